"""Windows with exact BatchNorm fail, resume and count as all split windows do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import Tensor, nn

from tests.helpers import trainer
from tests.lit.batch_norm.exact_fits import Images, Net, apart, exact, fit, images
from trainkit import (
    AccumulationCallback,
    AccumulationMixin,
    BatchNormGuard,
    ExactResume,
    MicroBatching,
    PerSample,
    ResumableLoader,
    Weighed,
    WindowMonitor,
)

SPLIT = MicroBatching(size=4)
INSIDE = MicroBatching(inside="net", size=4)


class _Fails(torch.autograd.Function):
    """Fails in the backward pass, if it is to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fail: Any) -> Tensor:
        ctx.fail = fail
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.fail()
        return gradients[0], None


class Short(nn.Module):
    """Its memory runs out when `need(place, rows)` says so."""

    def __init__(self, need: Callable[[str, int], None]) -> None:
        super().__init__()
        self.need = need

    def forward(self, x: Tensor) -> Tensor:
        self.need("forward", len(x))
        return _Fails.apply(x, lambda: self.need("backward", len(x)))  # type: ignore[return-value]


def short_of_memory(
    at: str = "", call: int = -1, most: int = 99
) -> tuple[Callable[[str, int], None], list[str]]:
    """What fails in one call, or with more rows than fit; and the list of its failures.

    Args:
        at: `"forward"` or `"backward"`.
        call: the number of the call that fails, of all micro-batches'.
        most: so many rows fit.
    """
    failures: list[str] = []
    counts = Counter[str]()

    def need(place: str, rows: int) -> None:
        counts[place] += 1
        if (place == at and counts[place] == call) or rows > most:
            failures.append(place)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 byte")

    return need, failures


class ShortNet(Net):
    """Its memory runs out between its layers."""

    def __init__(self, need: Callable[[str, int], None]) -> None:
        torch.manual_seed(8)
        super().__init__()
        self.second = nn.Sequential(self.second, Short(need))  # type: ignore[assignment]


def whole(**options: Any) -> Images:
    module = Images(ShortNet(short_of_memory()[0]))
    fit(module, **options)
    return module


def unproven(cut: MicroBatching, memory: Any = "auto") -> list[pl.Callback]:
    """Without the proof, whose passes would be counted too."""
    return [
        AccumulationCallback(PerSample(), micro_batching=cut, proof="off"),
        BatchNormGuard("exact", memory=memory),
    ]


@pytest.mark.parametrize(
    ("at", "call"),  # none of which is one of the calls that are checked
    [("forward", 14), ("backward", 9), ("backward", 16)],
)
def test_auto_runs_in_segments_once_memory_has_run_out(at: str, call: int) -> None:
    need, failures = short_of_memory(at, call)
    module = Images(ShortNet(need))
    fit(module, *unproven(SPLIT), epochs=2)
    assert failures == [at]
    assert apart(module, whole(epochs=2)) <= 1e-10


@pytest.mark.filterwarnings("ignore:.*open window .* was dropped")
@pytest.mark.parametrize("at", ["forward", "backward"])
def test_device_does_not(at: str) -> None:
    need, failures = short_of_memory(at, 30 if at == "forward" else 10)
    with pytest.raises(torch.OutOfMemoryError):
        fit(Images(ShortNet(need)), *unproven(SPLIT, "device"), epochs=2)
    assert failures == [at]


@pytest.mark.parametrize("memory", ["device", "flat"])
@pytest.mark.parametrize("inside", [None, "net"])
def test_finer_micro_batches_once_memory_has_run_out(inside: Any, memory: str) -> None:
    need, _ = short_of_memory(most=3)
    module = Images(ShortNet(need))
    start = 8 if inside is None else None
    callbacks = unproven(MicroBatching("auto", start=start, inside=inside), memory)
    fit(module, *callbacks, epochs=2)
    assert callbacks[0].micro_batch_size <= 3  # type: ignore[attr-defined]
    assert apart(module, whole(epochs=2)) <= 1e-10


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


@pytest.mark.parametrize("cut", [SPLIT, INSIDE])
def test_averages_of_weights(cut: MicroBatching) -> None:
    trained = []
    for callbacks in ([], exact(cut)):
        trained.append(Images())
        fit(trained[-1], *callbacks, Average())
    assert apart(*trained) <= 1e-10


@pytest.mark.parametrize("memory", ["device", "flat"])
@pytest.mark.parametrize("cut", [SPLIT, INSIDE])
def test_statistics_epoch_of_weight_averaging(cut: MicroBatching, memory: str) -> None:
    """The last epoch takes no step: its statistics are those of loader batches."""
    trained = []
    for callbacks in (
        [],
        [AccumulationCallback(PerSample())],
        exact(cut, memory),
        [AccumulationCallback(PerSample(), micro_batching=SPLIT)],
    ):
        module = Images()
        module.net.last_norm.momentum = 0.2  # type: ignore[union-attr]
        fit(module, StochasticWeightAveraging(0.05, swa_epoch_start=2), *callbacks)
        trained.append(module)
    plain, whole, module, naive = trained  # plain Lightning steps at the epoch's end
    assert apart(module, whole) <= 1e-10
    buffers = [dict(each.net.named_buffers()) for each in (plain, module, naive)]
    for name, value in buffers[0].items():
        assert torch.allclose(buffers[1][name].double(), value.double(), atol=1e-10)
    assert int(module.net.norm.num_batches_tracked) == 3  # type: ignore[union-attr, arg-type]
    name = "norm.running_var"
    assert float((buffers[2][name] - buffers[0][name]).abs().max()) > 1e-4


class NoMetrics(Images):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True)
        return loss


@pytest.mark.parametrize("memory", ["device", "flat"])
@pytest.mark.parametrize("cut", [SPLIT, INSIDE])
def test_resumed_training_is_the_same_to_the_bit(
    cut: MicroBatching, memory: str, tmp_path: Path
) -> None:
    def train(folder: Path, steps: int, ckpt_path: Any = None) -> Images:
        module = NoMetrics()
        torch.manual_seed(7)
        resume = ExactResume(dirpath=folder, every_n_train_steps=1)
        loader = ResumableLoader(images(), batch_size=10, shuffle=True)
        run = trainer(
            callbacks=[*exact(cut, memory), resume],
            max_epochs=-1,
            max_steps=steps,
            enable_checkpointing=True,
        )
        run.fit(module, loader, ckpt_path=ckpt_path)
        return module

    straight = train(tmp_path / "whole", 7)
    half = train(tmp_path / "half", 4)
    assert apart(half, straight) > 1e-3
    resumed = train(tmp_path / "half", 7, tmp_path / "half" / "last.ckpt")
    assert apart(resumed, straight) == 0


class Said(AccumulationMixin, Images):
    """Its loss divides by what only the step knows."""

    accumulation = Weighed()
    micro_batching = SPLIT

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        chosen = y > 0
        self.weigh(chosen.sum())
        logits = self.net(x)
        losses = F.cross_entropy(logits, y, reduction="none")
        loss = (losses * chosen).sum() / chosen.sum()
        self.log("loss", loss)
        return loss


class Plain(Images):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        losses = F.cross_entropy(self.net(batch[0]), batch[1], reduction="none")
        return losses[batch[1] > 0].mean()


def test_weights_that_the_step_says() -> None:
    plain, module = Plain(), Said()
    fit(plain)
    fit(module, BatchNormGuard("exact"))
    assert apart(module, plain) <= 1e-10


def test_outputs_of_a_window_are_put_together() -> None:
    class Look(pl.Callback):
        def __init__(self) -> None:
            self.logits: list[Tensor] = []

        def on_train_batch_end(self, *of: Any, **named: Any) -> None:
            self.logits.append(of[2]["logits"].detach().clone())

    plain, looks = Look(), Look()
    fit(Images(), plain, epochs=1)
    fit(Images(), *exact(SPLIT), looks, epochs=1)
    for one, other in zip(plain.logits, looks.logits, strict=True):
        assert torch.allclose(one, other, atol=1e-10)


def test_window_numbers() -> None:
    monitor = WindowMonitor(every_n_steps=1)
    fitted = fit(Images(), *exact(SPLIT), monitor, epochs=1)
    assert float(fitted.callback_metrics["window/micro_batches"]) == 1
    assert float(fitted.callback_metrics["window/weight"]) == 6


def test_dropout_is_the_same_in_both_ways() -> None:
    trained = []
    for memory in ("device", "flat"):
        net = nn.Sequential(
            nn.Conv2d(3, 6, 3),
            nn.BatchNorm2d(6),
            nn.Dropout(0.4),
            nn.GELU(),
            nn.Conv2d(6, 6, 3),
            nn.BatchNorm2d(6),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(6, 4),
        )
        torch.manual_seed(2)
        for each in net:
            if hasattr(each, "reset_parameters"):
                each.reset_parameters()  # type: ignore[operator]
        module = Images(net)
        torch.manual_seed(9)
        fit(module, *exact(SPLIT, memory))
        trained.append(module)
    assert apart(*trained) <= 1e-12
