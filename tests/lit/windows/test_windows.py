"""Which micro-batches make a window: schedules, limits, validation inside, None."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    GradientAccumulationScheduler,
    LearningRateFinder,
)
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from tests.helpers import (
    OPTIMIZERS,
    TokenNet,
    deviation,
    ragged_sequences,
    trainer,
    weights,
)
from tests.lit.fronts import (
    RAGGED,
    WINDOW,
    Mixed,
    Plain,
    batches_of,
    big_batch,
    cut,
    merged,
    micro_batches,
    pad,
    plain_token_loss,
    windows_of,
)
from tests.lit.resume.resuming import Saving
from trainkit import (
    AccumulationCallback,
    AccumulationStrategy,
    PerToken,
    Uniform,
)
from trainkit.errors import TrainkitError

SEQUENCES = ragged_sequences(38)
START = weights(Plain())


def by_windows(windows: Sequence[Sequence[int]], optimizer: str = "sgd") -> Tensor:
    """Weights after stepping once with each of these sets of samples."""
    net = TokenNet(dtype=torch.float64)
    stepper = OPTIMIZERS[optimizer](net.parameters())
    for window in windows:
        stepper.zero_grad()
        if window:
            plain_token_loss(net, pad([SEQUENCES[i] for i in window])).backward()
        stepper.step()
    return weights(net)


def windows_from(kept: Sequence[int], every: int) -> list[list[int]]:
    """The samples of windows of `every` micro-batches, only those that are kept."""
    parts = cut(SEQUENCES, RAGGED)
    groups = [range(i, min(i + every, len(parts))) for i in range(0, len(parts), every)]
    return [[s for k in group if k in kept for s in parts[k]] for group in groups]


def assert_exact(module: Any, expected: Tensor) -> None:
    assert deviation(module, expected, START) <= 1e-10


def test_gradient_accumulation_scheduler_equals_big_batches() -> None:
    """Lightning's own schedule, listed before or after trainkit's callback."""
    expected = by_windows(
        [*windows_from(range(10), 2), *windows_from(range(10), 4)], "momentum"
    )
    for order in (1, -1):
        listed = [GradientAccumulationScheduler({0: 2, 1: 4}), exact()][::order]
        module = Plain(optimizer="momentum")
        trainer(1, callbacks=listed).fit(module, micro_batches(SEQUENCES))
        assert_exact(module, expected)


def exact() -> AccumulationCallback:
    return AccumulationCallback(PerToken())


class Validated(Mixed):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        plain_token_loss(self.net, batch)


@pytest.mark.parametrize("interval", [1, 3, 5, 0.3])
def test_validation_inside_a_window_equals_none(interval: float) -> None:
    """pytorch-lightning#17207: validation comes between micro-batches of a window."""
    module = Validated(optimizer="momentum")
    trainer(WINDOW, val_check_interval=interval).fit(
        module, micro_batches(SEQUENCES), micro_batches(SEQUENCES, [4])
    )
    assert_exact(module, big_batch(SEQUENCES, optimizer="momentum").end)


@pytest.mark.parametrize("limit", [7, 0.7, 3])
def test_limit_train_batches_equals_big_batch_of_those(limit: float) -> None:
    count = round(limit * 10) if isinstance(limit, float) else limit
    module = Mixed()
    options = {"limit_train_batches": limit, "max_epochs": 1}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "accumulate_grad_batches=4: the epoch")
        trainer(WINDOW, **options).fit(module, micro_batches(SEQUENCES))
    assert_exact(
        module, by_windows(windows_from(range(count), WINDOW)[: -(-count // 4)])
    )


def test_fast_dev_run_equals_first_batches() -> None:
    module = Mixed()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "accumulate_grad_batches=4: the epoch")
        trainer(WINDOW, fast_dev_run=3).fit(module, micro_batches(SEQUENCES))
    assert_exact(module, by_windows([windows_from(range(3), WINDOW)[0]]))


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_max_steps_equals_so_many_big_batches(steps: int) -> None:
    """Windows are counted, not micro-batches; the second epoch starts afresh."""
    module = Mixed()
    fitted = trainer(WINDOW, max_steps=steps)
    fitted.fit(module, micro_batches(SEQUENCES))
    twice = windows_from(range(10), WINDOW) * 2
    assert fitted.global_step == steps
    assert_exact(module, by_windows(twice[:steps]))


class Stream(IterableDataset):  # type: ignore[type-arg]
    """Ready batches, of unknown number."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


@pytest.mark.parametrize("window", [3, 5, 100])
def test_stream_of_unknown_length_equals_big_batch(window: int) -> None:
    module = Mixed(optimizer="adamw")
    stream = Stream(list(batches_of(SEQUENCES, RAGGED)))
    trainer(window).fit(module, DataLoader(stream, batch_size=None))
    expected = big_batch(SEQUENCES, window=window, optimizer="adamw")
    assert_exact(module, expected.end)


def test_epoch_shorter_than_window_is_said_and_equals_big_batch() -> None:
    """pytorch-lightning#21808, pet#25, speculators#859."""
    module = Mixed()
    with pytest.warns(UserWarning, match="^accumulate_grad_batches") as said:
        trainer(64).fit(module, micro_batches(SEQUENCES))
    texts = [str(w.message) for w in said]
    assert [t for t in texts if t.startswith("accumulate")] == [
        "accumulate_grad_batches=64: the epoch has only 10 batches, so no window ever "
        "fills; every step is divided by the weight of those 10. Lower it, or make the "
        "epochs longer."
    ]
    assert_exact(module, big_batch(SEQUENCES, window=64).end)


class SometimesNone(Mixed):
    """Skips some micro-batches; of the others it returns a dict."""

    def __init__(self, skipped: Sequence[int]) -> None:
        super().__init__(optimizer="momentum")
        self.skipped = skipped

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx in self.skipped:
            return None
        return {"loss": super().training_step(batch, batch_idx), "extra": "kept"}


NONE = "ignore:`training_step` returned `None`:UserWarning"


@pytest.mark.filterwarnings(NONE)
@pytest.mark.parametrize(
    "skipped",
    [(0,), (1, 2), (3,), (9,), (4, 5, 6, 7), (0, 3, 8, 9), range(10)],
    ids=str,
)
def test_none_micro_batches_do_not_count(skipped: Sequence[int]) -> None:
    """First, middle, last of a window, a whole window, all of them."""
    module = SometimesNone(skipped)
    trainer(WINDOW, max_epochs=1).fit(module, micro_batches(SEQUENCES))
    kept = [i for i in range(10) if i not in skipped]
    expected = by_windows(windows_from(kept, WINDOW), "momentum")
    if kept:
        assert_exact(module, expected)
    else:
        assert torch.equal(weights(module), START)


@pytest.mark.filterwarnings(NONE)
def test_loss_of_window_equals_true_mean_undivided() -> None:
    """pytorch-lightning#13243, #2569: what callbacks are shown is the micro-batch's
    loss over N; the window's is the mean over what it holds."""
    module = SometimesNone([1])
    fitted = trainer(WINDOW, limit_train_batches=4, max_epochs=1)
    fitted.fit(module, micro_batches(SEQUENCES))
    window = windows_of(fitted).last_window
    kept = windows_from([0, 2, 3], WINDOW)[0]
    batch = pad([SEQUENCES[i] for i in kept])
    assert window is not None
    expected = plain_token_loss(TokenNet(dtype=torch.float64), batch)
    torch.testing.assert_close(window.loss, expected)
    assert int(window.num_micro_batches) == 3
    assert int(window.weight) == int((batch["labels"] != -100).sum())


class LoaderIterator(Plain):
    """Fetches its batches itself."""

    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        batch, _, _ = next(dataloader_iter)
        return plain_token_loss(self.net, batch)


@pytest.mark.filterwarnings("ignore:.*`dataloader_iter`:UserWarning")
def test_dataloader_iter_equals_one_step_for_each_batch() -> None:
    module = LoaderIterator()
    callbacks = [AccumulationCallback(Uniform())]
    trainer(1, callbacks=callbacks).fit(module, micro_batches(SEQUENCES))
    assert_exact(module, big_batch(SEQUENCES, window=1).end)


@pytest.mark.filterwarnings("ignore:.*`dataloader_iter`:UserWarning")
@pytest.mark.parametrize(
    ("strategy", "window", "text"),
    [(PerToken(), 1, "PerToken cannot weigh them"), (Uniform(), 2, "lags behind")],
)
def test_dataloader_iter_is_refused_where_it_cannot_be_exact(
    strategy: AccumulationStrategy, window: int, text: str
) -> None:
    with pytest.raises(TrainkitError, match=text):
        trainer(window, callbacks=[AccumulationCallback(strategy)]).fit(
            LoaderIterator(), micro_batches(SEQUENCES)
        )


class Changing(pl.Callback):
    """Sets the window's length in mid-epoch, as some schedules do."""

    def __init__(self, lengths: dict[int, int]) -> None:
        self.lengths = lengths

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        length = self.lengths.get(batch_idx, trainer.accumulate_grad_batches)
        trainer.accumulate_grad_batches = length


def test_window_length_changed_in_mid_epoch_leaks_nothing() -> None:
    """YOLO#225: Lightning steps after batches 0-1, then 2-3 without having zeroed the
    gradients of the first step, since 2 % 4 != 0."""
    module = Mixed()
    options = {"callbacks": [Changing({2: 4})], "limit_train_batches": 8}
    trainer(2, max_epochs=1, **options).fit(module, micro_batches(SEQUENCES))
    parts = cut(SEQUENCES, RAGGED)
    windows = [parts[0] + parts[1], parts[2] + parts[3], sum(parts[4:8], [])]
    assert_exact(module, by_windows(windows))


@pytest.mark.filterwarnings("ignore:train_dataloader yielded None:UserWarning")
def test_none_from_the_loader_leaks_nothing() -> None:
    """Lightning zeroes gradients with a window's first batch only, which is None."""
    batches: list[Any] = list(batches_of(SEQUENCES, RAGGED))
    batches[4] = None
    module = Mixed()
    trainer(WINDOW, max_epochs=1).fit(module, DataLoader(Stream(batches), None))
    kept = [i for i in range(10) if i != 4]
    assert_exact(module, by_windows(windows_from(kept, WINDOW)))


def test_big_batch_reference_merges_whole_windows() -> None:
    assert merged(RAGGED) == [len(w) for w in windows_from(range(10), WINDOW)]


def test_finders_are_announced() -> None:
    """They run without the callbacks, so their trial steps are plain Lightning's."""
    finder = LearningRateFinder(num_training_steps=3)
    callback = AccumulationCallback(PerToken())
    fitted = trainer(2, max_epochs=1, callbacks=[finder, callback])
    with pytest.warns(UserWarning, match="^LearningRateFinder: Lightning takes all"):
        callback.setup(fitted, Plain(), "fit")


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended")
def test_rest_of_a_window_from_a_loader_that_starts_again_is_said(
    tmp_path: Path,
) -> None:
    path = tmp_path / "inside.ckpt"
    trainer(WINDOW, max_epochs=1, callbacks=[Saving(path, 5)]).fit(
        Mixed(), micro_batches(SEQUENCES)
    )
    with pytest.warns(UserWarning, match="the train_dataloader starts again at its"):
        trainer(WINDOW, max_epochs=1).fit(
            Mixed(), micro_batches(SEQUENCES), ckpt_path=path
        )
