"""Windows with exact BatchNorm fail, resume and count as all split windows do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import Tensor

from tests.helpers import trainer
from tests.lit.batch_norm.exact_fits import Images, apart, exact, fit, images
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
from trainkit.core.tape.forward import TapedForward

SPLIT = MicroBatching(size=4)
INSIDE = MicroBatching(inside="net", size=4)


def run_short(
    monkeypatch: pytest.MonkeyPatch, most: int, **options: Any
) -> tuple[Images, Any, list[int]]:
    """A training in which no more rows than `most` fit into memory: the module, its
    callback, and the sizes that failed."""
    failed: list[int] = []
    run = TapedForward._run

    def short(self: Any, *args: Any) -> Any:
        if (rows := self.sizes.limit or args[-1]) > most:
            failed.append(rows)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 byte")
        return run(self, *args)

    monkeypatch.setattr(TapedForward, "_run", short)
    cut, module = MicroBatching(**options), Images()
    # Without the proof, whose passes would be counted too.
    callback = AccumulationCallback(PerSample(), micro_batching=cut, proof="off")
    fit(module, callback, BatchNormGuard("exact"), epochs=2)
    return module, callback, failed


@pytest.mark.parametrize("inside", [None, "net"])
def test_finer_chunks_once_memory_has_run_out(
    inside: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, callback, failed = run_short(monkeypatch, 3, inside=inside)
    assert failed == [10, 5]
    assert callback.micro_batch_size == 2
    whole = Images()
    fit(whole, epochs=2)
    assert apart(module, whole) <= 1e-10


@pytest.mark.filterwarnings("ignore:.*open window .* was dropped")
def test_memory_that_runs_out_with_a_size_of_the_users_ends_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        run_short(monkeypatch, 3, size=4)


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


@pytest.mark.parametrize("cut", [SPLIT, INSIDE])
def test_statistics_epoch_of_weight_averaging(cut: MicroBatching) -> None:
    """The last epoch takes no step: its statistics are those of loader batches."""
    trained = []
    for callbacks in (
        [],
        [AccumulationCallback(PerSample())],
        exact(cut),
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


@pytest.mark.parametrize("cut", [SPLIT, INSIDE])
def test_resumed_training_is_the_same_to_the_bit(
    cut: MicroBatching, tmp_path: Path
) -> None:
    def train(folder: Path, steps: int, ckpt_path: Any = None) -> Images:
        module = NoMetrics()
        torch.manual_seed(7)
        resume = ExactResume(dirpath=folder, every_n_train_steps=1)
        loader = ResumableLoader(images(), batch_size=10, shuffle=True)
        run = trainer(
            callbacks=[*exact(cut), resume],
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
