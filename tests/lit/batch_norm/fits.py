"""A small convolutional module, its data, and fits of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers import trainer
from tests.zoo.modules import by_hand
from tests.zoo.small_resnet import images, of_big_batch
from trainkit import AccumulationCallback, AccumulationMixin, BatchNormGuard, PerSample

ROWS, BATCH, WINDOW = 27, 4, 3
"""Seven micro-batches, the last of three rows: two windows of three and one of one."""

FEW = 15
"""Rows: four micro-batches, the last of three rows, in a window of three and one of
one."""


def dataset(rows: int = ROWS) -> TensorDataset:
    draw = torch.Generator().manual_seed(2)
    return TensorDataset(images(rows), torch.randint(0, 3, (rows,), generator=draw))


def batches(rows: int = ROWS, batch_size: int = BATCH, **options: Any) -> Any:
    return DataLoader(dataset(rows), batch_size=batch_size, **options)


def inputs(loader: Any) -> Tensor:
    return torch.cat([batch[0] for batch in loader])


class ConvNet(nn.Module):
    """BatchNorm after each of three layers."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.conv1, self.bn1 = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
            self.conv2, self.bn2 = nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8)
            self.flat, self.bn3 = nn.Linear(32, 8), nn.BatchNorm1d(8)
            self.head = nn.Linear(8, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        return self.head(torch.tanh(self.bn3(self.flat(x.flatten(1)))))


def two_layers() -> nn.Module:
    first = [nn.Linear(36, 8), nn.BatchNorm1d(8), nn.Tanh()]
    second = [nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Tanh()]
    return nn.Sequential(nn.Flatten(), *first, *second, nn.Linear(4, 3)).double()


class ConvModule(pl.LightningModule):
    """Knows nothing of trainkit."""

    net: Any

    def __init__(self, net: Callable[[], nn.Module] = ConvNet, lr: float = 0.1) -> None:
        super().__init__()
        self.net = net()
        self.lr = lr

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test", F.cross_entropy(self.net(batch[0]), batch[1]))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class MixedConv(AccumulationMixin, ConvModule):
    """The same with the mixin."""

    accumulation = PerSample()


class Validated(ConvModule):
    """Validates as well."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", F.cross_entropy(self.net(batch[0]), batch[1]))


class Builds(ConvModule):
    def __init__(self) -> None:
        super().__init__(nn.Identity)

    def configure_model(self) -> None:
        if isinstance(self.net, nn.Identity):
            self.net = ConvNet()


class BuildsInSetup(Builds):
    configure_model = pl.LightningModule.configure_model  # type: ignore[assignment]

    def setup(self, stage: str) -> None:
        Builds.configure_model(self)


class MixinBuilds(AccumulationMixin, Builds):
    accumulation = PerSample()


ByHand, Manual = by_hand(MixedConv), by_hand(ConvModule)


class FromWhereItWas:
    """A loader of one's own with a state, which first gives the rest of an epoch."""

    def __init__(self, given: int, rows: int = ROWS) -> None:
        self.batches, self.given = list(batches(rows)), given

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Any:
        given, self.given = self.given, 0
        return iter(self.batches[given:])

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: Any) -> None: ...


class At(pl.Callback):
    """Calls a function in one hook, with the Trainer and the module."""

    def __init__(self, hook: str, do: Callable[[Any, Any], object]) -> None:
        setattr(self, hook, lambda trainer, module, *args: do(trainer, module))


def fit(
    policy: Any = None,
    *others: Any,
    more: Sequence[Any] = (),
    module: Any = None,
    data: Any = None,
    val: Any = None,
    accumulate: int = WINDOW,
    ckpt_path: Path | None = None,
    exact: bool = False,
    **options: Any,
) -> Any:
    """Train, with a guard (a policy's name will do) or without; gives the module.

    Statistics know nothing of how gradients are weighed: `exact` adds the callback.
    `more` are callbacks too, of a table.
    """
    module = ConvModule() if module is None else module
    named: Any = policy
    guard = [BatchNormGuard(named) if isinstance(policy, str) else policy]
    guard = [] if policy is None else guard
    ours = [AccumulationCallback(PerSample())] if exact else []
    data = batches() if data is None else data
    trainer(accumulate, callbacks=[*guard, *ours, *others, *more], **options).fit(
        module, data, val, ckpt_path=ckpt_path
    )
    return module


def reference(module: Any, rows: Tensor | None = None) -> dict[str, Tensor]:
    """The statistics of all rows as one batch, under the module's present weights."""
    return of_big_batch(module.net, inputs(batches()) if rows is None else rows)
