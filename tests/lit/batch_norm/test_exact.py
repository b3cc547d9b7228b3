"""BatchNormGuard("exact") trains as the whole batch does."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import (
    GradientAccumulationScheduler,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from tests.helpers import trainer
from trainkit import (
    AccumulationCallback,
    AccumulationMixin,
    BatchNormGuard,
    LRScaling,
    MicroBatching,
    NoiseScale,
    PerSample,
    WindowMonitor,
)

pytestmark = pytest.mark.filterwarnings("ignore:Found .* in eval mode")

CLASSES = 4


class Net(nn.Module):
    """Two BatchNorms, a skip connection and a ReLU in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.second = nn.Conv2d(6, 6, 3, padding=1, bias=False)
        self.last_norm = nn.BatchNorm2d(6, momentum=None)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.norm(self.first(x)), inplace=True)
        hidden = hidden + self.last_norm(self.second(hidden))
        return self.head(F.relu(hidden).mean((2, 3)))


class Images(pl.LightningModule):
    """Logs and counts as a module of anybody's does; knows nothing of trainkit."""

    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = net or Net()
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")
        self.mean = MeanMetric()
        self.double()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        self.log("brightness", x.mean(), on_step=False, on_epoch=True)
        logits = self.net(x)
        loss = F.cross_entropy(logits, y)
        self.accuracy(logits.detach(), y)
        self.mean(loss.detach())
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return {"loss": loss, "logits": logits}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Bare(Images):
    """Its layers stand in the module itself, some are called in the step."""

    def __init__(self) -> None:
        super().__init__(nn.Identity())
        torch.manual_seed(4)
        self.stem = nn.Conv2d(3, 5, 3)
        self.norm = nn.BatchNorm2d(5)
        self.inner = nn.Linear(5, 5)
        self.twice = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, CLASSES)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.norm(self.stem(x))).mean((2, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("seen", batch[0].sum(), reduce_fx="sum", on_epoch=True)
        hidden = self(batch[0])
        more = self.twice(self.inner(hidden))
        hidden = hidden + self.twice(more.square())
        return F.cross_entropy(self.head(hidden), batch[1])


class Mixed(AccumulationMixin, Images):
    accumulation = PerSample()
    micro_batching = MicroBatching(size=4)


class Listed(Images):
    """Its blocks stand in a list, which itself is never called."""

    def __init__(self) -> None:
        super().__init__(nn.Identity())
        blocks = [
            nn.Sequential(nn.Conv2d(c, 5, 3, padding=1), nn.BatchNorm2d(5), nn.Tanh())
            for c in (3, 5)
        ]
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(5, CLASSES)
        self.double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = batch[0]
        for block in self.blocks:
            hidden = block(hidden)
        return F.cross_entropy(self.head(hidden.mean((2, 3))), batch[1])


class Stem(Images):
    """Calls a layer of its own in the step, and has no forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.BatchNorm2d(3).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(self.stem(batch[0])), batch[1])


def evaluating() -> Images:
    module = Images()
    module.net.eval()
    return module


class Thawed(pl.Callback):
    """Lets the layers evaluate until the second epoch begins."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        for layer in pl_module.modules():
            if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                layer.train(trainer.current_epoch > 0)


def images(number: int = 26) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(number, 3, 6, 6, dtype=torch.float64, generator=generator)
    y = torch.randint(CLASSES, (number,), generator=generator)
    return TensorDataset(x + y[:, None, None, None] * 0.3, y)


def loader(batch_size: int = 10, number: int = 26) -> DataLoader[Any]:
    """Of 26 images the last of three batches has 6."""
    return DataLoader(images(number), batch_size=batch_size)


def exact(cut: MicroBatching | None, proof: Any = "warn") -> list[pl.Callback]:
    """The callbacks of a training whose micro-batches share statistics."""
    ours = AccumulationCallback(PerSample(), micro_batching=cut, proof=proof)
    return [ours, BatchNormGuard("exact")]


def fit(
    module: pl.LightningModule,
    *callbacks: pl.Callback,
    window: int = 1,
    epochs: int = 2,
    batches: Any = None,
    **options: Any,
) -> pl.Trainer:
    """Six steps, unless something else is asked for."""
    fitted = trainer(window, callbacks=list(callbacks), max_epochs=epochs, **options)
    fitted.fit(module, batches or loader())
    return fitted


def apart(module: nn.Module, other: nn.Module) -> float:
    """The largest difference of weights, and of running statistics."""
    pairs = zip(module.state_dict().values(), other.state_dict().values(), strict=True)
    return max(float((one.double() - two.double()).abs().max()) for one, two in pairs)


SPLIT = MicroBatching(size=4)
INSIDE = MicroBatching(inside="net", size=4)


class Average(WeightAveraging):
    def __init__(self) -> None:
        super().__init__(
            use_buffers=True,
            avg_fn=lambda average, value, number: (
                average + (value - average) / 2 if value.is_floating_point() else value
            ),
        )

    def should_update(self, step_idx: Any = None, epoch_idx: Any = None) -> bool:
        return step_idx is not None


@dataclass
class Case:
    """A training in chunks.

    Attributes:
        make: the module.
        cut: the options; None where the module has its own.
        others: makes more callbacks.
        plain: the module that plain Lightning trains, if it is another one.
        naive: whether plain accumulation with the same callbacks is far off.
        options: of the Trainer.
    """

    make: Callable[[], Any] = Images
    cut: MicroBatching | None = SPLIT
    others: Callable[[], list[Any]] = list
    plain: Callable[[], Any] | None = None
    naive: bool = True
    options: Any = None


CASES = {
    "split": Case(),
    "inside, found": Case(cut=MicroBatching(inside="auto", size=3)),
    "no batch exceeds the size": Case(cut=MicroBatching(size=64), naive=False),
    "in the step": Case(Bare),
    "mixin": Case(Mixed, None, plain=Images),
    "list": Case(Listed),
    "layer in the step": Case(Stem, INSIDE, naive=False),
    "late": Case(evaluating, others=lambda: [Thawed()]),
    "averages": Case(others=lambda: [Average()]),
    "schedule of one": Case(others=lambda: [GradientAccumulationScheduler({0: 1})]),
    "clipped, inside": Case(cut=INSIDE, options={"gradient_clip_val": 0.05}),
}


@pytest.mark.parametrize("name", CASES)
def test_training_equals_whole_batches_and_a_plain_one_does_not(name: str) -> None:
    case = CASES[name]
    options = case.options or {}
    ours = exact(case.cut) if case.cut else [BatchNormGuard("exact")]
    whole, module, naive = (case.plain or case.make)(), case.make(), case.make()
    plain = fit(whole, *case.others(), **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*ran whole")
        fitted = fit(module, *case.others(), *ours, **options)
    assert apart(module, whole) <= 1e-10  # buffers too
    assert not [n for n, m in module.named_modules() if "forward" in vars(m)]
    assert list(module.state_dict()) == list(whole.state_dict())
    if case.plain is None:
        logged = {k: float(v) for k, v in fitted.callback_metrics.items()}
        wanted = {k: float(v) for k, v in plain.callback_metrics.items()}
        assert logged == pytest.approx(wanted, rel=1e-6)
    if case.naive:
        parts = AccumulationCallback(PerSample(), micro_batching=SPLIT)
        fit(naive, *case.others(), *([parts] if case.cut else []), **options)
        assert apart(naive, whole) > 1e-3


def test_rates_and_windows_numbers_are_those_of_one_batch(capsys: Any) -> None:
    module, plain = Listed(), Listed()
    monitor = WindowMonitor(every_n_steps=1)
    rate = LRScaling("sqrt", reference_batch=5)
    fitted = fit(module, *exact(SPLIT), rate, monitor)
    plain.configure_optimizers = lambda: torch.optim.SGD(  # type: ignore[method-assign]
        plain.parameters(), lr=0.1 * 2**0.5, momentum=0.9
    )
    fit(plain)
    assert apart(module, plain) <= 1e-10
    assert float(fitted.callback_metrics["window/micro_batches"]) == 1
    assert float(fitted.callback_metrics["window/weight"]) == 6
    assert "blocks.0, blocks.1 in chunks of at most 4 rows" in capsys.readouterr().out


def test_statistics_epoch_of_weight_averaging() -> None:
    """The last epoch takes no step: its statistics are those of loader batches."""
    trained = []
    streamed = AccumulationCallback(PerSample())
    split = AccumulationCallback(PerSample(), micro_batching=SPLIT)
    for callbacks in ([], [streamed], exact(SPLIT), [split]):
        module = Images()
        module.net.last_norm.momentum = 0.2  # type: ignore[union-attr]
        average = StochasticWeightAveraging(0.05, swa_epoch_start=2)
        fit(module, average, *callbacks, epochs=4)
        trained.append(module)
    plain, whole, module, naive = trained  # plain Lightning steps at the epoch's end
    assert apart(module, whole) <= 1e-10
    buffers = [dict(each.net.named_buffers()) for each in (plain, module, naive)]
    for name, value in buffers[0].items():
        assert torch.allclose(buffers[1][name].double(), value.double(), atol=1e-10)
    assert int(module.net.norm.num_batches_tracked) == 3  # type: ignore[union-attr, arg-type]
    name = "norm.running_var"
    assert float((buffers[2][name] - buffers[0][name]).abs().max()) > 1e-4


@pytest.mark.parametrize(
    ("cut", "words"),
    [(SPLIT, "have no gradients of their own"), (None, "so none has a gradient of i")],
)
def test_noise_scale_says_that_it_cannot_measure(cut: Any, words: str) -> None:
    noise = NoiseScale(every_n_steps=1, if_impossible="say")
    fit(Images(), *exact(cut), noise, epochs=1)
    assert noise.why_not is not None
    assert words in noise.why_not
