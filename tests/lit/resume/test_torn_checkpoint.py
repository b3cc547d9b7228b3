"""Checkpoints written while a micro-batch is under way, or has failed."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import OnExceptionCheckpoint

from tests.helpers import deviation, trainer
from tests.lit.fronts import WINDOW, Mixed
from tests.lit.resume.resuming import EXACT, START, Resumable, Saving, resumed


class Failing(Mixed):
    """Its forward pass fails once, as an out-of-memory would."""

    def __init__(self, at: int) -> None:
        super().__init__(optimizer="adamw")
        self.at = at

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == self.at:
            raise MemoryError
        return super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:`.fit.ckpt_path=None.` was called:UserWarning")
@pytest.mark.filterwarnings('ignore:.fit.ckpt_path="last". is set, but:UserWarning')
@pytest.mark.parametrize("at", [0, 1, 3, 6, 9])
def test_resumed_from_on_exception_checkpoint_equals_uninterrupted(
    tmp_path: Path, at: int
) -> None:
    saver = OnExceptionCheckpoint(tmp_path)
    fitted = trainer(WINDOW, callbacks=[saver], enable_checkpointing=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "accumulation: an open window")
        with pytest.raises(MemoryError):
            fitted.fit(Failing(at), Resumable())
    module = resumed(tmp_path / "on_exception.ckpt", replay=1)
    assert deviation(module, EXACT, START) <= 1e-10


@pytest.mark.parametrize(
    ("hook", "at"),
    [
        ("on_after_backward", 5),
        ("on_after_backward", 9),
        ("on_before_optimizer_step", 7),
        ("on_before_optimizer_step", 9),
    ],
)
def test_saved_while_a_micro_batch_is_under_way_is_said_twice(
    tmp_path: Path, hook: str, at: int
) -> None:
    """Torn: the resumed run repeats that micro-batch. Said when saved and resumed."""
    path = tmp_path / "torn.ckpt"
    lost = at % WINDOW
    text = f"first {lost} micro-batches are not in it: a micro-batch is under way"
    with pytest.warns(UserWarning, match=text):
        trainer(WINDOW, callbacks=[Saving(path, at, hook)]).fit(
            Mixed(optimizer="adamw"), Resumable()
        )
    with pytest.warns(UserWarning, match=f"does not hold the {lost} micro-batches"):
        resumed(path, replay=1)


@pytest.mark.parametrize("hook", ["on_after_backward", "on_before_optimizer_step"])
def test_saved_in_a_window_of_one_equals_uninterrupted(
    tmp_path: Path, hook: str
) -> None:
    """Nothing is lost where the resumed run repeats all there was."""
    path = tmp_path / "one.ckpt"
    module = Mixed(optimizer="adamw")
    trainer(1, callbacks=[Saving(path, 5, hook)]).fit(module, Resumable())
    again = Mixed(optimizer="adamw")
    trainer(1).fit(again, Resumable(replay=1), ckpt_path=path)
    assert deviation(again, module, START) <= 1e-10


def test_saved_inside_training_step_equals_uninterrupted(tmp_path: Path) -> None:
    """Before its backward pass the window is whole up to the batch before."""
    path = tmp_path / "step.ckpt"

    class SavingInside(Mixed):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 6 and not path.exists():
                self.trainer.save_checkpoint(path)
            return super().training_step(batch, batch_idx)

    trainer(WINDOW).fit(SavingInside(optimizer="adamw"), Resumable())
    assert deviation(resumed(path, replay=1), EXACT, START) <= 1e-10
