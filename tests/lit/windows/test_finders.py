"""Lightning's finders, called while training is under way, leave no trace in it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from torch import Tensor

from tests.helpers import NAIVE, deviation, loader, ragged_sequences, trainer, weights
from tests.lit.fronts import Plain, windows_of
from tests.lit.split.common import START, Split, pad_and_mask
from trainkit import AccumulationCallback, PerToken
from trainkit.core.split.micro_batching import MicroBatching
from trainkit.errors import TrainkitError
from trainkit.lit.callback.base import is_taken_out

SEQUENCES = ragged_sequences(58)
CUT = MicroBatching(size=1)
pytestmark = pytest.mark.filterwarnings("ignore:.*Lightning takes all other callbacks")


class RateInTraining(LearningRateFinder):
    """As `FineTuneLearningRateFinder` of Lightning's documentation."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None: ...

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            pl_module.searches = True
            self.lr_find(trainer, pl_module)
            pl_module.searches = False


class SizeInTraining(BatchSizeFinder):
    """Its trials take no step once `global_step` is beyond theirs."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None: ...

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 0 and not pl_module.searches:
            pl_module.searches = True
            self.scale_batch_size(trainer, pl_module)
            pl_module.searches = False


class ByHand(pl.Callback):
    """What a finder has found, without its search."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            for group in trainer.optimizers[0].param_groups:
                group["lr"] = self.rate


class Tuned:
    """What the finders look for, and what the search saw."""

    lr = 0.1
    batch_size = 2
    searches = False

    def train_dataloader(self: Any) -> Any:
        return loader(SEQUENCES, self.batch_size, collate=pad_and_mask)

    def configure_optimizers(self: Any) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)

    def on_train_batch_end(self: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.searches:
            self.num_trials = getattr(self, "num_trials", 0) + 1


class Own(Tuned, Split): ...


class Foreign(Tuned, Plain): ...


FRONTS: dict[str, Callable[[], tuple[Any, list[Any]]]] = {
    "split mixin": lambda: (Own(cut=CUT), []),
    "split callback": lambda: (
        Foreign(),
        [AccumulationCallback(PerToken(), micro_batching=CUT)],
    ),
    "streamed mixin": lambda: (Own(cut=None), []),
    "streamed callback": lambda: (Foreign(), [AccumulationCallback(PerToken())]),
}


def fit(front: str, *callbacks: Any, window: int, **changed: Any) -> tuple[Any, Any]:
    module, mine = FRONTS[front]()
    vars(module).update(changed)
    fitted = trainer(window, callbacks=[*mine, *callbacks], max_epochs=3)
    fitted.fit(module)
    return module, fitted


@cache
def untouched(window: int) -> Tensor:
    """The weights without a search."""
    return weights(fit("streamed mixin", window=window)[0])


@pytest.mark.parametrize(
    ("front", "window"), list(zip(FRONTS, (1, 2, 2, 1), strict=True))
)
def test_rate_finder_in_training_equals_its_rate_by_hand(
    front: str, window: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    finder = RateInTraining(
        num_training_steps=14, min_lr=0.01, early_stop_threshold=None
    )
    found, trained = fit(front, finder, window=window)
    assert found.num_trials == 14 * window
    assert found.lr != 0.1
    by_hand, reference = fit(front, ByHand(found.lr), window=window)
    assert deviation(found, by_hand, START) <= 1e-12
    windows = [windows_of(each) for each in (trained, reference)]
    assert windows[0].accumulators[0].num_windows == trained.global_step
    for name in ("weight", "loss", "samples"):
        mine, theirs = (float(getattr(w.last_window, name)) for w in windows)
        assert mine == pytest.approx(theirs, rel=1e-12)
    assert deviation(untouched(window), by_hand, START) > NAIVE


@pytest.mark.parametrize("front", FRONTS)
def test_size_finder_in_training_equals_its_size_by_hand(
    front: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    finder = SizeInTraining(steps_per_trial=2, max_trials=3)
    found, _ = fit(front, finder, window=1)
    assert found.num_trials == 6
    assert found.batch_size == 8
    by_hand, _ = fit(front, window=1, batch_size=8)
    assert weights(found).isfinite().all()
    assert deviation(found, by_hand, START) <= 1e-12


class RateInsideWindow(RateInTraining):
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None: ...

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 2:
            self.lr_find(trainer, pl_module)


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended")
@pytest.mark.parametrize("front", ["split mixin", "split callback"])
def test_search_inside_a_window_is_refused(
    front: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = "taken out .*inside a window of 2 micro-batches so far.*on_train_epoch_st"
    with pytest.raises(TrainkitError, match=text):
        fit(front, RateInsideWindow(num_training_steps=19), window=2)


class TakingOut(pl.Callback):
    """Leaves nobody but itself, as no finder does for good."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            trainer.callbacks = [self]


@pytest.mark.parametrize("front", ["split mixin", "split callback"])
def test_a_callback_that_is_taken_out_for_good_is_announced(front: str) -> None:
    with pytest.warns(
        UserWarning, match="Callback: it is not among trainer.callb"
    ) as w:
        fit(front, TakingOut(), window=1)
    assert sum("not among trainer" in str(each.message) for each in w) == 1


def test_a_callback_is_taken_out_where_another_list_is_in_its_place() -> None:
    mine, equal = AccumulationCallback(PerToken()), AccumulationCallback(PerToken())
    fitted = trainer(callbacks=[mine])
    assert not is_taken_out(mine, fitted)
    assert is_taken_out(equal, fitted)
    fitted.callbacks = []  # type: ignore[assignment]
    assert is_taken_out(mine, fitted)
