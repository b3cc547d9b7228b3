"""Pools: loader batches that are cut together train as one big batch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import (
    GradientAccumulationScheduler,
    OnExceptionCheckpoint,
)
from torch import Tensor

from tests.helpers import NAIVE, deviation, loader, ragged_sequences, trainer, weights
from tests.lit.split.common import FIXED, START, Seen, Split, fit, logging_loss
from tests.zoo.callbacks import Ending, Saving, Table
from tests.zoo.modules import Plain, Stream, hooked, on_front, pad_and_mask
from trainkit import (
    AccumulationSchedule,
    ExactResume,
    MicroBatching,
    PerToken,
    ResumableLoader,
    TrainkitError,
    Uniform,
)
from trainkit.lit.callback.base import is_rehearsal
from trainkit.lit.split import pools

ROWS = ragged_sequences(54)
POOL = MicroBatching(tokens=48, pool=8)
CUTS = {
    "tokens": POOL,
    "size": MicroBatching(size=4, pool=8),
    "auto": MicroBatching("auto", pool=8),
    "shapes": MicroBatching(tokens=48, shapes=3, pool=8),
    "whole": MicroBatching(size=100, trim=False, pool=8),
}


def stream(size: int) -> Stream:
    """Ready batches, each padded by itself, of a number that nobody knows."""
    starts = range(0, len(ROWS), size)
    return Stream([pad_and_mask(ROWS[at : at + size]) for at in starts])


def whole() -> Split:
    """Trained with a pool as one batch: the last one is short."""
    fit(module := Split(cut=None), data=stream(24))
    return module


@pytest.mark.parametrize(("name", "window"), [*((n, 1) for n in CUTS), ("tokens", 8)])
def test_a_pool_trains_as_one_big_batch(name: str, window: int) -> None:
    """The proof rehearses it. The control: micro-batches that all count alike."""
    module = Split(cut=CUTS[name])
    alike = Split(cut=CUTS[name], strategy=Uniform())
    module.proof = "require"
    fitted = fit(module, data=stream(3), window=window)
    assert fitted.global_step == 6
    assert fitted.accumulate_grad_batches == window
    assert deviation(module, expected := whole(), START) <= 1e-12
    if name == "tokens":
        alike.proof = "off"
        with pytest.warns(UserWarning, match="Uniform"):
            fit(alike, data=stream(3))
        assert deviation(alike, expected, START) > NAIVE


class Tuples(Split):
    """Takes tuples; labels that are ignored have a number of their own."""

    def loss_of(self, batch: Any) -> Any:
        ids, mask, labels = batch
        labels = torch.where(labels == 999, -100, labels)
        return super().loss_of({"ids": ids, "attention_mask": mask, "labels": labels})


def as_tuple(rows: Any) -> tuple[Tensor, Tensor, Tensor]:
    batch = pad_and_mask(rows)
    labels = batch["labels"].masked_fill(batch["labels"] == -100, 999)
    return batch["ids"], batch["attention_mask"], labels


def test_columns_are_filled_with_what_the_strategy_ignores() -> None:
    """Also where no loader batch of the pool shows what it pads with: a row each."""
    cut = MicroBatching(tokens=48, lengths=1, pool=24)
    module = Tuples(cut=cut, strategy=PerToken(2, ignore_index=999))
    fitted = fit(module, data=Stream([as_tuple([row]) for row in ROWS]))
    assert fitted.global_step == 6
    assert deviation(module, whole(), START) <= 1e-12


@pytest.mark.parametrize("front", ["mixin", "callback"])
def test_configure_optimizers_counts_the_steps_of_pools(front: str) -> None:
    numbers = []

    def configure_optimizers(self: Any) -> Any:
        numbers.append(self.trainer.estimated_stepping_batches)
        return Plain.configure_optimizers(self)

    counts: Any = hooked(Plain, configure_optimizers=configure_optimizers)
    module, ours = on_front(front, counts, cut=POOL)
    data = loader(ROWS, 3, collate=pad_and_mask)
    assert fit(module, *ours, data=data).global_step == 6
    assert {*numbers} == {6}


def test_callbacks_see_each_loader_batch_once_in_the_order_of_lightning() -> None:
    """As in a window of plain Lightning; the batch is that of the loader. Forward
    passes of a pool run when it is full, and `training_step` gets the last batch's
    number; without a pool each batch's own."""
    seen, numbers = [], list[int]()

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        if not is_rehearsal(self.trainer):
            numbers.append(batch_idx)
        return self.loss_of(batch)

    for cut, window in ((None, 8), (FIXED, 8), (POOL, 1)):
        numbers.clear()
        kind = hooked(Split, training_step=training_step)
        fit(kind(cut=cut), each := Seen(), data=stream(3), window=window)
        seen.append(each)
        assert {*numbers} == ({7, 15, 17} if cut is POOL else {*range(18)})
    for each in seen:
        assert each.hooks == seen[0].hooks
        assert each.rows == [3] * 36


def test_what_is_logged_is_what_the_big_batch_logs() -> None:
    """Also without a pool, where loader batches wait and are cut each by itself."""
    tables = []
    for cut, size, window in ((None, 24, 1), (POOL, 3, 1), (FIXED, 3, 8)):
        kind = hooked(Split, training_step=logging_loss(on_step=True, on_epoch=True))
        table = Table()
        how: Any = {"log_every_n_steps": 1, "window": window}
        fit(kind(cut=cut), data=stream(size), logger=table, **how)
        tables.append(table.column("loss_step") + table.column("loss_epoch"))
    assert len(tables[0]) == 6 + 2
    for table in tables[1:]:
        assert table == pytest.approx(tables[0], rel=1e-6)


# ---- resumed -------------------------------------------------------------------------


OF_FOUR = MicroBatching(tokens=48, pool=4)


def run(
    folder: Path,
    *callbacks: Any,
    cut: Any = OF_FOUR,
    window: int = 1,
    start: Any = None,
) -> Tensor:
    """Train, perhaps from a checkpoint."""
    module = Split(cut=cut)
    data = ResumableLoader(ROWS, 6, collate_fn=pad_and_mask)
    options: Any = {"enable_checkpointing": True, "default_root_dir": folder}
    options |= {"ckpt_path": start or None, "window": window}
    fit(module, ExactResume(), *callbacks, data=data, **options)
    return weights(module)


@pytest.mark.parametrize(
    ("at", "how"),
    [*((at, {}) for at in (3, 5, 8)), (5, {"cut": FIXED, "window": 4})],
)
def test_a_checkpoint_holds_the_loader_batches_that_wait(
    tmp_path: Path, at: int, how: Any
) -> None:
    """The control: a checkpoint without them."""
    path, bare = tmp_path / "within.ckpt", tmp_path / "bare.ckpt"
    end = run(tmp_path, Saving(path, at), **how)
    assert torch.equal(run(tmp_path, start=path, **how), end)
    saved = torch.load(path, weights_only=True)
    (waiting,) = saved.get(pools.KEY, [[]])
    assert len(waiting) == (at + 1) % 4 * (at < 8)
    if waiting:
        del saved[pools.KEY]
        torch.save(saved, bare)
        assert deviation(run(tmp_path, start=bare, **how), end, START) > NAIVE


@pytest.mark.filterwarnings("ignore:.*ckpt_path")
def test_a_checkpoint_after_an_error_holds_the_loader_batches_that_wait(
    tmp_path: Path,
) -> None:
    """And a run that cuts none says that it leaves them out."""
    saver = OnExceptionCheckpoint(tmp_path, "failed")
    with pytest.raises(RuntimeError, match="failed"):
        run(tmp_path, Ending(6, RuntimeError("failed")), saver)
    path = tmp_path / "failed.ckpt"
    assert torch.equal(run(tmp_path, start=path), run(tmp_path))
    text = "3 loader batches that waited were dropped, since the checkpoint holds them"
    with pytest.warns(UserWarning, match=text):
        run(tmp_path, cut=None, start=path)


def test_a_checkpoint_of_one_rank_says_what_it_lacks() -> None:
    found = pools.Pools()
    of_two: Any = {"world_size": 2, "global_rank": 1, "interrupted": True}
    trainer = SimpleNamespace(accumulate_grad_batches=1, callbacks=[], **of_two)
    found.begin(trainer, POOL)
    found.waiting, checkpoint = [(each, (), {}) for each in "ab"], dict[str, Any]()
    with pytest.warns(UserWarning, match="only the 2 loader batches that wait on rank"):
        found.save(trainer, checkpoint)
    assert checkpoint[pools.KEY] == [None, found.waiting]


@pytest.mark.parametrize(("batch", "is_said"), [(Path(), True), ([1, "a"], False)])
def test_a_checkpoint_says_that_its_batches_cannot_be_loaded(
    batch: Any, is_said: bool, recwarn: pytest.WarningsRecorder
) -> None:
    found = pools.Pools()
    alone: Any = {"world_size": 1, "global_rank": 0, "interrupted": False}
    found.waiting = [(batch, (), {})]
    found.save(SimpleNamespace(accumulate_grad_batches=4, **alone), {})
    assert ["weights_only=False" in str(w.message) for w in recwarn] == [True] * is_said


def test_a_window_that_was_not_cut_is_dropped_where_batches_are(tmp_path: Path) -> None:
    path = tmp_path / "inside.ckpt"
    run(tmp_path, Saving(path, 5), cut=None, window=4)
    text = "an open window of 2 .* the checkpoint has its gradients and not its loader"
    with pytest.warns(UserWarning, match=text):
        run(tmp_path, cut=FIXED, window=4, start=path)


def test_another_size_of_windows_is_refused() -> None:
    with pytest.raises(TrainkitError, match="must be 1 or 8, received 4. Leave it out"):
        fit(Split(cut=POOL), data=stream(3), window=4)
    for schedule in (AccumulationSchedule, GradientAccumulationScheduler):
        with pytest.raises(TrainkitError, match=r"received \d, and a schedule"):
            fit(Split(cut=POOL), schedule({0: 8}), data=stream(3))


def test_a_pool_that_comes_in_setup_is_refused() -> None:
    """Steps may have been counted without it; the Trainer is as it was."""
    late = hooked(Split, setup=lambda m, stage: setattr(m, "micro_batching", POOL))
    fitting = trainer()
    with pytest.raises(TrainkitError, match="was None then and is 8 now. Assign"):
        fitting.fit(late(cut=None), stream(3))
    assert fitting.accumulate_grad_batches == 1


def test_batches_that_wait_when_an_epoch_ends_early_are_announced() -> None:
    def ends(self: Any, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 10 else None

    kind = hooked(Split, on_train_batch_start=ends)
    with pytest.warns(UserWarning, match="2 loader batches that waited were dropped"):
        fit(kind(cut=POOL), data=stream(3), max_epochs=1)
