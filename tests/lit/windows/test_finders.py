"""Lightning's finders, called before training or under way, leave no trace in it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    LambdaCallback,
    LearningRateFinder,
)
from lightning.pytorch.tuner.tuning import Tuner

from tests.helpers import NAIVE, deviation, loader, ragged_sequences, trainer, weights
from tests.zoo.modules import Plain, on_front, pad_and_mask
from trainkit import MicroBatching
from trainkit.errors import TrainkitError

SEQUENCES = ragged_sequences(58)
CUT = MicroBatching(size=1)
FRONTS = [("mixin", None), ("callback", CUT)]
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


def train(of: str, cut: Any, *callbacks: Any, window: int, **changed: Any) -> Any:
    module, mine = on_front(of, Tuned, cut=cut)
    vars(module).update(changed)
    fitted = trainer(window, callbacks=[*mine, *callbacks], max_epochs=3)
    fitted.fit(module)
    return module


@pytest.mark.parametrize(("front", "cut"), FRONTS)
def test_rate_finder_in_training_equals_its_rate_by_hand(front: str, cut: Any) -> None:
    def by_hand(trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 1:
            trainer.optimizers[0].param_groups[0]["lr"] = found.lr

    how: dict[str, Any] = {"min_lr": 0.01, "early_stop_threshold": None}
    finder = RateInTraining(num_training_steps=14, **how)
    found = train(front, cut, finder, window=2)
    assert found.num_trials == 14 * 2
    assert found.lr != 0.1
    hand = LambdaCallback(on_train_epoch_start=by_hand)
    expected = train(front, cut, hand, window=2)
    assert deviation(found, expected, START) <= 1e-12
    assert found.trainer.global_step == expected.trainer.global_step
    assert deviation(train(front, cut, window=2), expected, START) > NAIVE


@pytest.mark.parametrize(("front", "cut"), FRONTS)
def test_size_finder_in_training_equals_its_size_by_hand(front: str, cut: Any) -> None:
    finder = SizeInTraining(steps_per_trial=2, max_trials=3)
    found = train(front, cut, finder, window=1)
    assert found.num_trials == 6
    assert found.batch_size == 8
    by_hand = train(front, cut, window=1, batch_size=8)
    assert deviation(found, by_hand, START) <= 1e-12


def finds_rate(tuner: Any, module: Any) -> None:
    tuner.lr_find(module, num_training=8, update_attr=True)


def finds_size(tuner: Any, module: Any) -> None:
    tuner.scale_batch_size(module, max_trials=2)


@pytest.mark.parametrize(
    ("tune", "name"),
    [(finds_rate, "LearningRateFinder"), (finds_size, "BatchSizeFinder")],
)
def test_tuners_run_on_whole_batches(tune: Any, name: str) -> None:
    """Before training. Lightning's finders leave callbacks out, and so the cut: their
    trial steps are plain Lightning's, which is said."""
    module, ours = on_front("mixin", Tuned, cut=CUT)
    tuner = Tuner(fitted := trainer(1, callbacks=ours, max_epochs=1))
    text = f"^{name}: Lightning takes all other callbacks"
    with pytest.warns(UserWarning, match=text):
        tune(tuner, module)
    assert torch.equal(weights(module), START)
    fitted.fit(module)
    assert not torch.equal(weights(module), START)


def take_out(trainer: Any, module: Any) -> None:
    """Without a search, for good."""
    if trainer.current_epoch == 1:
        trainer.callbacks = []


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended")
@pytest.mark.parametrize(
    ("takes", "window", "text"),
    [
        (
            RateInsideWindow(num_training_steps=19),
            2,
            "Callback was taken out of it, .*inside a window of 1 micro-b",
        ),
        (
            LambdaCallback(on_train_epoch_start=take_out),
            1,
            "leave trainkit's callback in",
        ),
    ],
)
def test_a_callback_that_is_taken_out_is_refused(
    takes: Any, window: int, text: str
) -> None:
    """Inside a window, or by nobody who searches."""
    with pytest.raises(TrainkitError, match=text):
        train("callback", CUT, takes, window=window)
