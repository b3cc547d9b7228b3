"""Steps that a gradient scaler skips: no more than in plain Lightning, and counted."""

from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from tests.helpers import TOLERANCE, deviation, ragged_sequences, trainer, weights
from tests.lit.fronts import WINDOW, Mixed, Plain, micro_batches, windows_of
from tests.lit.resume.resuming import Resumable, Saving
from tests.lit.windows.half import SEQUENCES, START, Heavy, fit, half, precise
from trainkit import AccumulationCallback, AccumulationStrategy, PerToken
from trainkit.errors import TrainkitError

OVERFLOWS = 2.0**28
"""A scaler's first factor that costs the first steps, with or without trainkit."""


class Watching(pl.Callback):
    """Counts the steps that were taken, by the weights, and keeps the scale."""

    def __init__(self) -> None:
        self.num_taken = 0
        self.scales: list[float] = []
        self._before: Tensor | None = None

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = weights(pl_module)
        before = START if self._before is None else self._before
        self.num_taken += not torch.equal(now, before)
        self._before = now
        self.scales.append(trainer.precision_plugin.scaler.get_scale())


@cache
def plainly(init_scale: float) -> Watching:
    """What plain Lightning comes to."""
    plain = Watching()
    fit(half(), "16-mixed", plain, epochs=4, init_scale=init_scale)
    return plain


# 2^16 fits; with 2^28 the first steps overflow, with or without trainkit.
@pytest.mark.parametrize(
    ("front", "strategy", "init_scale"),
    [
        ("mixin", PerToken(), OVERFLOWS),
        ("callback", Heavy(), 2.0**16),
        ("mixin", Heavy(1e8), 2.0**16),
        ("callback", Heavy(1e8), OVERFLOWS),
    ],
    ids=str,
)
def test_steps_lost_to_the_scaler_equal_those_of_plain_lightning(
    front: str, strategy: AccumulationStrategy, init_scale: float
) -> None:
    plain, ours = plainly(init_scale), Watching()
    module = half(Mixed if front == "mixin" else Plain)
    callbacks: list[pl.Callback] = [ours]
    if isinstance(module, Mixed):
        module.accumulation = strategy
    else:
        callbacks.append(AccumulationCallback(strategy))
    fitted = fit(module, "16-mixed", *callbacks, epochs=4, init_scale=init_scale)
    skipped = windows_of(fitted).num_skipped_steps
    assert skipped == fitted.global_step - ours.num_taken
    assert ours.num_taken >= plain.num_taken
    assert min(ours.scales) >= min(plain.scales)
    assert bool(skipped) == (init_scale > 2.0**16)


SCHEDULER_FIRST = "ignore:Detected call of `lr_scheduler.step..` before:UserWarning"


@pytest.mark.filterwarnings(SCHEDULER_FIRST)
@pytest.mark.parametrize("hold", [True, False])
def test_scheduler_is_held_back_only_if_asked(hold: bool) -> None:
    """keras#20878, holocron#504: a skipped step moves Lightning's scheduler."""
    module = Scheduled()
    module.hold_schedulers = hold
    fitted = fit(module, "16-mixed", init_scale=OVERFLOWS, epochs=4)
    skipped = windows_of(fitted).num_skipped_steps
    assert 0 < skipped < fitted.global_step == 12
    moved = fitted.lr_scheduler_configs[0].scheduler.last_epoch  # type: ignore[union-attr]
    assert moved == 12 - (skipped if hold else 0)


@pytest.mark.filterwarnings(SCHEDULER_FIRST)
@pytest.mark.parametrize("hold", [True, False])
def test_the_callback_holds_schedulers_too(hold: bool) -> None:
    class Bare(Plain):
        configure_optimizers, interval = Scheduled.configure_optimizers, "step"

    module = Bare(dtype=torch.float32)
    ours = AccumulationCallback(PerToken(), hold_schedulers=hold)
    fitted = fit(module, "16-mixed", ours, init_scale=OVERFLOWS, epochs=4)
    skipped = windows_of(fitted).num_skipped_steps
    assert 0 < skipped < fitted.global_step == 12
    moved = fitted.lr_scheduler_configs[0].scheduler.last_epoch  # type: ignore[union-attr]
    assert moved == 12 - (skipped if hold else 0)
    assert "lr_scheduler_step" not in vars(module)


class Scheduled(Mixed):
    interval = "step"

    def __init__(self) -> None:
        super().__init__(dtype=torch.float32)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
        config = {"scheduler": scheduler, "interval": self.interval}
        return {"optimizer": optimizer, "lr_scheduler": config}


class ScheduledByEpoch(Scheduled):
    interval = "epoch"


@pytest.mark.filterwarnings(SCHEDULER_FIRST)
def test_scheduler_by_epoch_is_never_held_back() -> None:
    module = ScheduledByEpoch()
    module.hold_schedulers = True
    fitted = fit(module, "16-mixed", init_scale=2.0**60)
    assert windows_of(fitted).num_skipped_steps == 6
    assert fitted.lr_scheduler_configs[0].scheduler.last_epoch == 2  # type: ignore[union-attr]


class NoneAt(Mixed):
    """Returns None for some micro-batches."""

    def __init__(self, *skipped: int) -> None:
        super().__init__(dtype=torch.float32)
        self.skipped = skipped

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx in self.skipped:
            return None
        return super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`:UserWarning")
def test_none_on_last_micro_batch_under_a_scaler_is_refused() -> None:
    """Lightning would skip the whole window without a word."""
    with (
        pytest.warns(UserWarning, match="an open window of 3 micro-batches"),
        pytest.raises(TrainkitError, match="returned None on the last micro-batch"),
    ):
        fit(NoneAt(3), "16-mixed")


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`:UserWarning")
@pytest.mark.parametrize("skipped", [(0,), (1, 2), (4, 5, 6, 7)], ids=str)
def test_none_elsewhere_under_a_scaler_does_not_count(skipped: tuple[int, ...]) -> None:
    module = NoneAt(*skipped)
    fit(module, "16-mixed", epochs=1)
    reference = NoneAt(*skipped)
    trainer(WINDOW, max_epochs=1).fit(reference, micro_batches(SEQUENCES))
    assert deviation(module, reference, START) <= TOLERANCE[torch.float16]


class Fused(Mixed):
    """An optimizer that takes the scaler's factor off inside its step."""

    def __init__(self, kind: str, *, fused: bool = True) -> None:
        super().__init__(dtype=torch.float32)
        self.kind = kind
        self.fused = fused

    def configure_optimizers(self) -> Any:
        make = {"AdamW": torch.optim.AdamW, "SGD": torch.optim.SGD}[self.kind]
        return make(self.parameters(), lr=0.05, fused=self.fused)


@pytest.mark.parametrize(
    ("kind", "init_scale"), [("AdamW", OVERFLOWS), ("SGD", 2.0**16)]
)
def test_fused_optimizer_under_a_scaler_equals_unfused(
    kind: str, init_scale: float
) -> None:
    """pytorch-lightning#21435: gradients are still scaled at the hook; announced."""
    module, reference = Fused(kind), Fused(kind, fused=False)
    announced = f"{kind}\\(fused=True\\) under a gradient scaler"
    with pytest.warns(UserWarning, match=announced):
        fitted = fit(module, "16-mixed", init_scale=init_scale, epochs=4)
    expected = fit(reference, "16-mixed", init_scale=init_scale, epochs=4)
    skipped = windows_of(fitted).num_skipped_steps
    assert skipped == windows_of(expected).num_skipped_steps
    assert bool(skipped) == (init_scale > 2.0**16)
    assert deviation(module, reference, START) <= 1e-5


def test_fused_optimizer_without_a_scaler_is_not_announced() -> None:
    module, reference = Fused("AdamW"), Fused("AdamW", fused=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*fused=True")
        trainer(WINDOW).fit(module, micro_batches(SEQUENCES))
    trainer(WINDOW).fit(reference, micro_batches(SEQUENCES))
    assert deviation(module, reference, START) <= 1e-5


@pytest.mark.filterwarnings(SCHEDULER_FIRST)
def test_scheduler_is_held_back_under_a_fused_optimizer() -> None:
    class FusedScheduled(Scheduled):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1, fused=True)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
            config = {"scheduler": scheduler, "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": config}

    module = FusedScheduled()
    module.hold_schedulers = True
    with pytest.warns(UserWarning, match="fused=True"):
        fitted = fit(module, "16-mixed", init_scale=OVERFLOWS, epochs=4)
    skipped = windows_of(fitted).num_skipped_steps
    assert 0 < skipped < 12
    assert fitted.lr_scheduler_configs[0].scheduler.last_epoch == 12 - skipped  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "sizes", [(1, 30, 30, 30), (60, *(1,) * 31)], ids=["light", "heavy"]
)
def test_no_step_is_lost_after_an_uneven_start(sizes: tuple[int, ...]) -> None:
    """A first micro-batch that weighs little; a short last window before a full one."""
    sequences = ragged_sequences(sum(sizes), longest=40)
    window = len(sizes) - 1 if sizes[0] > 1 else len(sizes)
    module = half(Mixed)
    fitted = trainer(window, max_epochs=4, **precise("16-mixed"))
    fitted.fit(module, micro_batches(sequences, sizes))
    assert windows_of(fitted).num_skipped_steps == 0
    assert fitted.precision_plugin.scaler.get_scale() == 2.0**16  # type: ignore[attr-defined]


@pytest.mark.parametrize("at", [1, 5, 12])
def test_resumed_inside_a_scaled_window_equals_uninterrupted(
    tmp_path: Path, at: int
) -> None:
    """The partial gradients hold the scaler's factor, which is saved as well."""
    path = tmp_path / "inside.ckpt"
    module, again = half(Mixed), half(Mixed)
    options = precise("16-mixed", init_scale=2.0**28)
    trainer(WINDOW, callbacks=[Saving(path, at)], **options).fit(module, Resumable())
    fitted = trainer(WINDOW, **precise("16-mixed"))
    fitted.fit(again, Resumable(), ckpt_path=path)
    assert deviation(again, module, START) <= 1e-6


def test_skipped_steps_are_counted_afresh_in_each_fit() -> None:
    """The scaler has found its factor in the first one."""
    callback = AccumulationCallback(PerToken())
    fitted = fit(half(), "16-mixed", callback, epochs=4, init_scale=OVERFLOWS)
    assert callback.num_skipped_steps > 0
    fitted.fit_loop.max_epochs = 16
    fitted.fit(half(), micro_batches(SEQUENCES))
    assert callback.num_skipped_steps == 0


@pytest.mark.parametrize(
    ("saved_in", "resumed_in"),
    [
        ("16-mixed", "16-mixed"),
        ("16-mixed", "bf16-mixed"),
        ("16-mixed", "32-true"),
        ("32-true", "16-mixed"),
    ],
)
def test_window_resumed_in_another_precision_keeps_its_scale(
    tmp_path: Path, saved_in: str, resumed_in: str
) -> None:
    """What was saved carries the scaler's factor, and the rest another or none."""
    path = tmp_path / "inside.ckpt"
    saved = trainer(WINDOW, callbacks=[Saving(path, 5)], **precise(saved_in))
    saved.fit(half(Mixed), Resumable())
    resumed, reference = Norms(), Norms()
    again = trainer(WINDOW, callbacks=[resumed], **precise(resumed_in))
    again.fit(half(Mixed), Resumable(), ckpt_path=path)
    trainer(WINDOW, callbacks=[reference]).fit(half(Mixed), Resumable())
    expected = reference.seen[-len(resumed.seen) :]
    assert resumed.seen == pytest.approx(expected, rel=0.02)


class Norms(pl.Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_before_optimizer_step(
        self, trainer: Any, pl_module: Any, optimizer: Any
    ) -> None:
        found = [p.grad.flatten() for p in pl_module.parameters() if p.grad is not None]
        self.seen.append(float(torch.cat(found).norm()))
