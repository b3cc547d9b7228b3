"""Lightning's finders, called while training is under way, leave no trace in it."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    LambdaCallback,
    LearningRateFinder,
)
from torch import Tensor

from tests.helpers import NAIVE, deviation, loader, ragged_sequences, trainer, weights
from tests.lit.fronts import windows_of
from tests.zoo import Plain, on_front, pad_and_mask
from trainkit import MicroBatching
from trainkit.errors import TrainkitError

SEQUENCES = ragged_sequences(58)
CUT = MicroBatching(size=1)
FRONTS: dict[str, tuple[str, Any]] = {
    "split mixin": ("mixin", CUT),
    "split callback": ("callback", CUT),
    "streamed mixin": ("mixin", None),
    "streamed callback": ("callback", None),
}
SPLIT = list(FRONTS)[:2]
START = weights(Plain())
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*Lightning takes all other callbacks"),
    pytest.mark.usefixtures("folder"),
]


@pytest.fixture
def folder(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finders write a checkpoint into the current one."""
    monkeypatch.chdir(tmp_path)


class Tuned(Plain):
    """Has what the finders look for, and counts their trials."""

    lr = 0.1
    batch_size = 2
    searches = False
    num_trials = 0

    def train_dataloader(self) -> Any:
        return loader(SEQUENCES, self.batch_size, collate=pad_and_mask)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.num_trials += self.searches


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


class RateInsideWindow(RateInTraining):
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None: ...

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self.lr_find(trainer, pl_module)


def train(front: str, *callbacks: Any, window: int, **changed: Any) -> tuple[Any, Any]:
    of, cut = FRONTS[front]
    module, mine = on_front(of, Tuned, cut=cut)
    vars(module).update(changed)
    fitted = trainer(window, callbacks=[*mine, *callbacks], max_epochs=3)
    fitted.fit(module)
    return module, fitted


@cache
def untouched(window: int) -> Tensor:
    """The weights without a search."""
    return weights(train("streamed mixin", window=window)[0])


@pytest.mark.parametrize(
    ("front", "window"), list(zip(FRONTS, (1, 2, 2, 1), strict=True))
)
def test_rate_finder_in_training_equals_its_rate_by_hand(
    front: str, window: int
) -> None:
    def by_hand(trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 1:
            trainer.optimizers[0].param_groups[0]["lr"] = found.lr

    how: dict[str, Any] = {"min_lr": 0.01, "early_stop_threshold": None}
    finder = RateInTraining(num_training_steps=14, **how)
    found, trained = train(front, finder, window=window)
    assert found.num_trials == 14 * window
    assert found.lr != 0.1
    hand = LambdaCallback(on_train_epoch_start=by_hand)
    expected, reference = train(front, hand, window=window)
    assert deviation(found, expected, START) <= 1e-12
    assert trained.global_step == reference.global_step
    windows = [windows_of(each).last_window for each in (trained, reference)]
    for name in ("weight", "loss", "samples"):
        mine, theirs = (float(getattr(each, name)) for each in windows)
        assert mine == pytest.approx(theirs, rel=1e-12)
    assert deviation(untouched(window), expected, START) > NAIVE


@pytest.mark.parametrize("front", FRONTS)
def test_size_finder_in_training_equals_its_size_by_hand(front: str) -> None:
    finder = SizeInTraining(steps_per_trial=2, max_trials=3)
    found, _ = train(front, finder, window=1)
    assert found.num_trials == 6
    assert found.batch_size == 8
    by_hand, _ = train(front, window=1, batch_size=8)
    assert weights(found).isfinite().all()
    assert deviation(found, by_hand, START) <= 1e-12


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended")
@pytest.mark.parametrize("front", SPLIT)
def test_search_inside_a_window_is_refused(front: str) -> None:
    text = "taken out .*inside a window of 1 micro-batches so far.*on_train_epoch_st"
    with pytest.raises(TrainkitError, match=text):
        train(front, RateInsideWindow(num_training_steps=19), window=2)


@pytest.mark.parametrize("front", SPLIT)
def test_a_callback_that_is_taken_out_for_good_is_announced(front: str) -> None:
    def take_out(trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 1:
            trainer.callbacks = []

    takes = LambdaCallback(on_train_epoch_start=take_out)
    with pytest.warns(UserWarning, match="Callback: it is not among trainer.cal") as w:
        train(front, takes, window=1)
    assert sum("not among trainer" in str(each.message) for each in w) == 1
