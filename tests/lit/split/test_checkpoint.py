"""Checkpoints of runs that cut their batches: no state crosses loader batches."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor

from tests.helpers import deviation, trainer, weights
from tests.lit.fronts import big_batch
from tests.lit.resume.resuming import SEQUENCES, START, Resumable, Saving, holds
from tests.lit.split.common import Split
from trainkit.core.split.micro_batching import MicroBatching
from trainkit.lit.resume.epoch_sums import EpochSums

CUT = MicroBatching(size=2)


def adamw(cut: MicroBatching | None = CUT, made: Callable[..., Split] = Split) -> Split:
    return made(cut=cut, optimizer="adamw")


@cache
def uninterrupted(window: int = 1) -> Tensor:
    """After two epochs of `Resumable`'s batches."""
    return big_batch(SEQUENCES, window=window, optimizer="adamw").end


def resumed(
    path: Path, *, replay: int = 0, window: int = 1, cut: MicroBatching | None = CUT
) -> Split:
    module = adamw(cut)
    trainer(window).fit(module, Resumable(replay), ckpt_path=path, weights_only=True)
    return module


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int], Path]:
    """Checkpoints of one run for each length of a window, after so many batches."""
    folder = tmp_path_factory.mktemp("saved")
    places = {1: (0, 4, 9, 12), 2: (4, 5, 6), 4: (4, 5, 6)}

    def path_of(at: int, window: int) -> Path:
        return folder / f"{window}" / f"{at}.ckpt"

    for window, after in places.items():
        saving = [Saving(path_of(at, window), at) for at in after]
        trainer(window, callbacks=saving).fit(adamw(), Resumable())
    return path_of


@pytest.mark.parametrize(
    ("at", "cut"),
    [(0, "same"), (4, "another"), (4, "none"), (9, "none"), (12, "same")],
)
def test_resumed_in_mid_epoch_equals_uninterrupted(
    saved: Callable[[int, int], Path], at: int, cut: str
) -> None:
    """Also with another cut, or without one: the checkpoint knows of none."""
    path = saved(at, 1)
    others = {"same": CUT, "another": MicroBatching(tokens=24), "none": None}
    module = resumed(path, cut=others[cut])
    assert deviation(module, uninterrupted(), START) <= 1e-10
    assert "windows" not in holds(path)


@pytest.mark.parametrize(("at", "window"), [(4, 2), (5, 2), (4, 4), (5, 4), (6, 4)])
def test_resumed_inside_a_window_of_several_loader_batches(
    saved: Callable[[int, int], Path], window: int, at: int
) -> None:
    module = resumed(saved(at, window), window=window)
    assert deviation(module, uninterrupted(window), START) <= 1e-10


@pytest.mark.parametrize("hook", ["on_after_backward", "on_before_optimizer_step"])
def test_saved_while_a_loader_batch_is_under_way(tmp_path: Path, hook: str) -> None:
    """The resumed run runs that loader batch again, all of it: nothing is lost."""
    path = tmp_path / "under_way.ckpt"
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "checkpoint")
        trainer(1, callbacks=[Saving(path, 5, hook)]).fit(adamw(), Resumable())
        module = resumed(path, replay=1)
    assert deviation(module, uninterrupted(), START) <= 1e-10


class Failing(Split):
    """Fails in a micro-batch."""

    at = 0
    calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls += 1
        if self.calls == self.at:
            raise ValueError("mine")
        return super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:accumulation. an open window")
@pytest.mark.filterwarnings("ignore:`.fit.ckpt_path=None.` was called:UserWarning")
@pytest.mark.filterwarnings('ignore:.fit.ckpt_path="last". is set, but:UserWarning')
@pytest.mark.parametrize("at", [1, 2, 3, 15])
def test_resumed_after_an_error_in_a_micro_batch(tmp_path: Path, at: int) -> None:
    """In the first, a middle and the last micro-batch of a loader batch."""
    module = adamw(made=Failing)
    module.at = at  # type: ignore[attr-defined]
    saver = OnExceptionCheckpoint(tmp_path)
    fitted = trainer(1, callbacks=[saver], enable_checkpointing=True)
    with pytest.raises(ValueError, match="mine"):
        fitted.fit(module, Resumable())
    again = resumed(tmp_path / "on_exception.ckpt", replay=1)
    assert deviation(again, uninterrupted(), START) <= 1e-10


class Logging(Split):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=False, on_epoch=True)
        self.log_exact("exact", loss, batch)
        return loss


def test_means_of_a_resumed_epoch_are_those_of_the_whole_epoch(tmp_path: Path) -> None:
    """With `EpochSums`; `log_exact` goes on by itself."""
    path = tmp_path / "mid.ckpt"
    whole = trainer(1, callbacks=[EpochSums(), Saving(path, 4)], max_epochs=1)
    whole.fit(adamw(made=Logging), Resumable())
    again = trainer(1, callbacks=[EpochSums()], max_epochs=1)
    again.fit(adamw(made=Logging), Resumable(), ckpt_path=path)
    expected = {k: float(v) for k, v in whole.callback_metrics.items()}
    found = {k: float(v) for k, v in again.callback_metrics.items()}
    assert found == pytest.approx(expected)
    assert set(found) == {"loss", "exact"}


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_last_checkpoint_of_model_checkpoint_goes_on(tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path, every_n_train_steps=3, save_top_k=-1)
    options = {"callbacks": [saving], "enable_checkpointing": True}
    module = adamw()
    trainer(1, **options).fit(module, Resumable())
    found = sorted(tmp_path.iterdir())
    assert len(found) == 6
    for path in found[::2]:
        assert deviation(resumed(path), weights(module), START) <= 1e-10
