"""Small nets with BatchNorm, written out in the styles of known ones."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 5


def conv(i: int, o: int, size: int = 3, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    """Without a bias, which a BatchNorm behind it takes away."""
    return nn.Conv2d(i, o, size, stride, size // 2, groups=groups, bias=False)


def conv_bn(i: int, o: int, act: nn.Module | None = None, **options: Any) -> Any:
    return nn.Sequential(
        conv(i, o, **options), nn.BatchNorm2d(o), act or nn.ReLU(inplace=True)
    )


def pooled(x: Tensor) -> Tensor:
    return torch.flatten(F.adaptive_avg_pool2d(x, 1), 1)


class BasicBlock(nn.Module):
    """As in ResNet-18."""

    def __init__(self, i: int, o: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv(i, o, stride=stride), nn.BatchNorm2d(o)
        self.relu = nn.ReLU(inplace=True)
        self.conv2, self.bn2 = conv(o, o), nn.BatchNorm2d(o)
        self.downsample: nn.Module | None = None
        if stride != 1 or i != o:
            self.downsample = nn.Sequential(conv(i, o, 1, stride), nn.BatchNorm2d(o))

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class Bottleneck(nn.Module):
    """As in ResNet-50; the result is added to what came in, in place."""

    def __init__(self, i: int, o: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv(i, o // 2, 1), nn.BatchNorm2d(o // 2)
        self.conv2 = conv(o // 2, o // 2, stride=stride)
        self.bn2 = nn.BatchNorm2d(o // 2)
        self.conv3, self.bn3 = conv(o // 2, o, 1), nn.BatchNorm2d(o)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = nn.Sequential(conv(i, o, 1, stride), nn.BatchNorm2d(o))

    def forward(self, x: Tensor) -> Tensor:
        identity = self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        identity += self.bn3(self.conv3(out))
        return self.relu(identity)


class ResNet(nn.Module):
    """The 18 layers of the smallest one, in few channels."""

    def __init__(self, block: Any = BasicBlock, per_stage: int = 2, width: int = 4):
        super().__init__()
        self.conv1, self.bn1 = conv(3, width), nn.BatchNorm2d(width)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 1, 1)
        stages, i = [], width
        for number in range(4):
            o = width * 2 ** min(number, 2)
            stride = 2 if number in (1, 2) else 1
            stages.append(block(i, o, stride))
            stages += [block(o, o) for _ in range(per_stage - 1)]
            i = o
        self.stages, self.fc = nn.Sequential(*stages), nn.Linear(i, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        return self.fc(pooled(self.stages(x)))


class UNet(nn.Module):
    """Skip connections over many layers; the input itself is one of them."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        widths = [3, width, 2 * width, 4 * width]
        pairs = zip(widths, widths[1:], strict=False)
        self.down = nn.ModuleList(
            nn.Sequential(conv_bn(i, o), conv_bn(o, o)) for i, o in pairs
        )
        self.up = nn.ModuleList(
            nn.ModuleDict(
                {
                    "up": nn.ConvTranspose2d(2 * o, o, 2, 2),
                    "body": nn.Sequential(conv_bn(2 * o, o), conv_bn(o, o)),
                }
            )
            for o in (2 * width, width)
        )
        self.head = nn.Conv2d(width + 3, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        image, skips = x, []
        for number, part in enumerate(self.down):
            x = part(F.max_pool2d(x, 2) if number else x)
            skips.append(x)
        skips.pop()
        for part in self.up:
            assert isinstance(part, nn.ModuleDict)
            skip = skips.pop()
            x = F.interpolate(part["up"](x), size=skip.shape[2:])
            x = part["body"](torch.cat([skip, x], 1))
        return self.head(torch.cat([x, image], 1))


class DenseNet(nn.Module):
    """Each layer gets all earlier ones, and is normalised before its convolution."""

    def __init__(self, growth: int = 3, layers: int = 4) -> None:
        super().__init__()
        self.stem = conv(3, growth)
        self.norms, self.convs = nn.ModuleList(), nn.ModuleList()
        for number in range(layers):
            width = growth * (number + 1)
            self.norms.append(nn.BatchNorm2d(width))
            self.convs.append(conv(width, growth))
        self.norm = nn.BatchNorm2d(growth * (layers + 1))
        self.fc = nn.Linear(growth * (layers + 1), CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        features = [self.stem(x)]
        for norm, one in zip(self.norms, self.convs, strict=True):
            features.append(one(F.relu(norm(torch.cat(features, 1)), inplace=True)))
        return self.fc(pooled(F.relu(self.norm(torch.cat(features, 1)))))


class Inverted(nn.Module):
    """As in MobileNetV2: wide within, a depthwise convolution, no activation behind."""

    def __init__(self, i: int, o: int, stride: int = 1, expand: int = 3) -> None:
        super().__init__()
        wide, act = i * expand, nn.ReLU6(inplace=True)
        self.adds = stride == 1 and i == o
        self.body = nn.Sequential(
            conv_bn(i, wide, act, size=1),
            conv_bn(wide, wide, act, stride=stride, groups=wide),
            conv(wide, o, 1),
            nn.BatchNorm2d(o),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.adds else self.body(x)


class MobileNet(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            conv_bn(3, 4, nn.ReLU6(inplace=True)),
            Inverted(4, 4),
            Inverted(4, 6, stride=2),
            Inverted(6, 6),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Dropout(0.0),
            nn.Linear(6, CLASSES),
        )


class ShuffleUnit(nn.Module):
    """One half of the channels goes by; then the halves are mixed."""

    def __init__(self, width: int, *, by_index: bool) -> None:
        super().__init__()
        half = width // 2
        self.by_index = by_index
        self.body = nn.Sequential(
            conv_bn(half, half, size=1),
            conv(half, half, groups=half),
            nn.BatchNorm2d(half),
            conv_bn(half, half, size=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.by_index:
            halves = x.chunk(2, 1)
            out = self.body(halves[1])
            out = torch.cat((halves[0], out), 1)  # taken over three layers
        else:
            one, two = x.chunk(2, 1)
            out = torch.cat((one, self.body(two)), 1)
        rows, channels, high, wide = out.size()
        out = out.view(rows, 2, channels // 2, high, wide)
        return out.transpose(1, 2).contiguous().view(rows, -1, high, wide)


class Shuffle(nn.Module):
    def __init__(self, *, by_index: bool = False) -> None:
        super().__init__()
        self.stem = conv_bn(3, 8)
        units = [ShuffleUnit(8, by_index=by_index) for _ in range(2)]
        self.units, self.fc = nn.Sequential(*units), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.units(self.stem(x)).mean([2, 3]))


def plain(**options: Any) -> nn.Module:
    """A stack, whose layers get these options."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4, **options),
        nn.ReLU(),
        nn.Conv2d(4, 6, 3, 2),
        nn.BatchNorm2d(6, **options),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(54, CLASSES),
        nn.BatchNorm1d(CLASSES, **options),
        nn.Tanh(),
        nn.Linear(CLASSES, CLASSES),
    )


class Both(nn.Module):
    """Two inputs, two outputs, and a flag that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = conv_bn(3, 4), conv_bn(3, 4, size=1)
        self.joint = conv_bn(8, 4)
        self.a, self.b = nn.Linear(4, CLASSES), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor, *, other: Tensor, scale: float = 2.0) -> Any:
        one, two = self.one(x), self.two(other)
        joint = self.joint(torch.cat([one, two * scale], 1))
        return self.a(pooled(joint)), self.b(pooled(torch.cat([one, two], 1)))


class Twice(nn.Module):
    """One layer, and one block of layers, are called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn = conv(3, 4), nn.BatchNorm2d(4)
        self.block, self.fc = BasicBlock(4, 4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(self.stem(x))
        x = self.bn(torch.tanh(x))
        return self.fc(pooled(self.block(self.block(x).sin())))


class OtherDims(nn.Module):
    """BatchNorm3d, BatchNorm1d over sequences, and over rows."""

    def __init__(self) -> None:
        super().__init__()
        self.conv3, self.bn3 = nn.Conv3d(1, 3, 3, padding=1), nn.BatchNorm3d(3)
        self.conv1, self.bn1 = nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4)
        self.fc, self.bn0 = nn.Linear(4, CLASSES), nn.BatchNorm1d(CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.bn3(self.conv3(x.unsqueeze(1))))
        x = torch.tanh(self.bn1(self.conv1(x.flatten(2))))
        return self.bn0(self.fc(x.mean(2)))


class InDict(nn.Module):
    """Returns several outputs by name, one of which has no graph."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.fc = conv_bn(3, 4), nn.Linear(4, CLASSES)
        self.bn = nn.BatchNorm1d(CLASSES)

    def forward(self, x: Tensor) -> dict[str, Any]:
        features = self.body(x)
        out = self.bn(self.fc(pooled(features)))
        return {"out": out, "best": out.argmax(1), "all": [features, x]}


class InPlace(nn.Module):
    """Values that other parts use are changed in place, on both sides of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.bn0, self.conv1, self.bn1 = (
            nn.BatchNorm2d(3),
            conv(3, 4),
            nn.BatchNorm2d(4),
        )
        self.conv2, self.bn2, self.fc = conv(4, 4), nn.BatchNorm2d(4), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(self.bn0(x))
        out = self.bn1(h).mul_(1.5)
        more = self.bn2(self.conv2(F.relu(out)))
        out += more
        out[:, 1:3] *= 2
        return self.fc(pooled(F.leaky_relu_(out, 0.2)))


def resnet(
    *,
    first: int = 64,
    widths: tuple[int, ...] = (256, 512, 1024, 2048),
    depths: tuple[int, ...] = (3, 4, 6, 3),
    num_classes: int = 1000,
    activation: str = "relu",
) -> nn.Module:
    """A ResNet-50, or a smaller one: the model's own layers, one after the other.

    The model itself looks at the shape of its images, which tracing cannot follow.
    """
    from transformers import ResNetConfig, ResNetModel

    config = ResNetConfig(
        embedding_size=first,
        hidden_sizes=list(widths),
        depths=list(depths),
        hidden_act=activation,
    )
    model: Any = ResNetModel(config)
    layers = [layer for stage in model.encoder.stages for layer in stage.layers]
    stem = [model.embedder.embedder, model.embedder.pooler]
    end = [model.pooler, nn.Flatten(), nn.Linear(widths[-1], num_classes)]
    return nn.Sequential(*stem, *layers, *end)
