"""Which sizes are tried, on which rows, and how those are found out that do not fit."""

from __future__ import annotations

import math
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from tests.helpers import TokenModule, pad, ragged_sequences, weights
from tests.lit.probe.finding import (
    TARGET,
    Data,
    Limited,
    Net,
    found,
    limited,
    quick,
    rows,
    run_out,
)
from tests.zoo.modules import Stream, hooked
from trainkit import BatchPlan
from trainkit.data.rows import LEAST, Rows, num_elements
from trainkit.errors import TrainkitError
from trainkit.lit.probe.attempt import Trial, search, sizes_for
from trainkit.lit.probe.find import find_micro_batch

# ---- which sizes are tried -----------------------------------------------------------


def machine(fits_up_to: float = math.inf) -> tuple[Any, list[int]]:
    """Something that tries sizes, and the list of those tried."""
    tried: list[int] = []

    def attempt(size: int) -> Trial:
        tried.append(size)
        return Trial(size=size, fits=size <= fits_up_to)

    return attempt, tried


def largest(trials: list[Trial]) -> int | None:
    return max((trial.size for trial in trials if trial.fits), default=None)


@given(st.integers(1, 2000), st.integers(1, 8), st.integers(1, 300))
def test_every_size_is_that_of_the_plan_it_makes(
    target: int, world_size: int, largest: int
) -> None:
    sizes = sizes_for(target=target, world_size=world_size, largest=largest)
    assert sizes
    how: Any = {"target": target, "world_size": world_size}
    for size in sizes:
        assert BatchPlan.make(**how, max_micro_batch=size).micro_batch == size


@given(st.integers(1, 2000), st.integers(1, 2000), st.integers(1, 2000))
def test_largest_that_fits_is_found(target: int, start: int, fits_up_to: int) -> None:
    sizes = sizes_for(target=target, world_size=1, largest=target)
    attempt, tried = machine(fits_up_to=fits_up_to)
    found = search(sizes, start, attempt)
    assert largest(found) == max(size for size in sizes if size <= fits_up_to)
    assert sorted(tried) == [trial.size for trial in found], "what is said was tried"
    assert len(tried) == len(set(tried)), "no size is tried twice"


LARGE = sizes_for(target=720, world_size=1, largest=720)
SIZES = [1, 2, 3, 4, 6, 8, 12, 16]
SEARCHES: list[Any] = [  # sizes, the start, what fits, what is found, what comes first
    (sizes_for(target=512, world_size=1, largest=512), 48, math.inf, 512, [32]),
    (SIZES, 16, 1, 1, [16, 8, 4, 2, 1]),
    (LARGE, 3, 100, 90, [3]),  # thirty divisors: doubling alone would stop at 48
    ([1, 2, 4], 4, 0, None, [4, 2, 1]),
]


@pytest.mark.parametrize(("sizes", "start", "fits", "most", "first"), SEARCHES)
def test_sizes_are_tried_from_the_start(
    sizes: Any, start: int, fits: float, most: int | None, first: list[int]
) -> None:
    attempt, tried = machine(fits_up_to=fits)
    assert largest(search(sizes, start, attempt)) == most
    assert tried[: len(first)] == first
    assert len(tried) < 12


# ---- rows are those of the loader, put together by its own function ------------------


class AtOnce:
    """Gives several rows at once, and no row by itself."""

    def __len__(self) -> int:
        return 3

    def __getitems__(self, indices: list[int]) -> Any:
        return [index * 10 for index in indices]


SEVEN = BatchSampler(SequentialSampler(range(7)), 2, drop_last=False)
SEQUENCES = ragged_sequences(20)
LONGEST = pad(sorted(SEQUENCES, key=num_elements, reverse=True)[:5])
LOADERS: list[Any] = [  # of what a loader is made, how many rows it has, the longest
    ({"dataset": [[1], [1, 2, 3], [1, 2]]}, 3, [[1, 2, 3], [1, 2], [1], [1, 2, 3]]),
    ({"dataset": SEQUENCES, "collate_fn": pad}, 20, LONGEST),
    ({"dataset": AtOnce()}, 3, [0, 10, 20]),
    ({"dataset": Stream(range(3))}, None, [0, 1, 2, 0]),  # goes round
    ({"dataset": range(7), "batch_sampler": SEVEN}, 7, [0, 1, 2]),
]


@pytest.mark.parametrize(("how", "number", "longest"), LOADERS)
def test_the_longest_rows_of_a_loader_are_put_together_by_its_own_function(
    how: dict[str, Any], number: int | None, longest: Any
) -> None:
    rows = Rows(DataLoader(**{"collate_fn": list, **how}))
    assert len(rows) == number if number else len(rows) > 10**9
    found = rows.longest(5 if longest is LONGEST else len(longest))
    torch.testing.assert_close(found, longest, rtol=0, atol=0)


def test_no_more_rows_are_read_than_are_needed() -> None:
    read: list[int] = []

    class Data:
        def __len__(self) -> int:
            return 10**6

        def __getitem__(self, index: int) -> Any:
            read.append(index)
            return [index]

    rows = Rows(DataLoader(Data(), 4, collate_fn=list))  # type: ignore[arg-type]
    assert len(rows) == 10**6
    rows.longest(8)
    assert len(read) == LEAST
    rows.longest(2 * LEAST)
    assert read == list(range(4 * LEAST))


@pytest.mark.parametrize(
    ("row", "number"),
    [
        (torch.zeros(2, 3), 6),
        (np.zeros((4, 2)), 8),
        ({"text": "four", "ids": [1, 2]}, 6),
        ((torch.zeros(()), 1.5, None), 3),
        (np.float32(1), 1),
    ],
)
def test_what_a_row_holds(row: Any, number: int) -> None:
    assert num_elements(row) == number


# ---- sizes that do not fit are found out, with room to spare, and leave nothing ------


def greedy(module: Any) -> Any:
    """An optimizer whose state does not fit."""
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.1)
    optimizer.step = lambda closure: (closure(), run_out())
    return optimizer


def absurd(self: Any, batch: Any, batch_idx: int) -> Tensor:
    """Ends with the CPU allocator's own error."""
    if len(batch[0]) > 9:
        torch.empty(2**60)
    return Net.training_step(self, batch, batch_idx)


def mistaken(self: Any, batch: Any, batch_idx: int) -> Tensor:
    """A shape that is wrong is no lack of memory, however large the batch."""
    return batch[0] @ batch[0]


STARTS = [(where, size) for where in ("forward", "backward") for size in (1, 4, 32)]
FOUND: list[Any] = [
    # A module, its data, options; the largest size that fits, the smallest that does
    # not, and how many rows have run (orobix/quadra#118: what is taken was tried).
    *((limited(rows=9, where=way), Data(size), {}, 8, 16, 9) for way, size in STARTS),
    # pytorch-lightning#8028, #9625: what just fitted runs out while training.
    (limited(rows=8), Data(), {"margin": 0.0}, 8, 16, 8),
    (limited(rows=8), Data(), {"margin": 0.1}, 4, 8, 5),
    (limited(rows=8), Data(), {"margin": 0.5}, 4, 8, 6),
    # orobix/quadra#118: a batch of all rows proves nothing about larger ones.
    (Net(), Data(number=10), {"target": 64}, 8, None, None),
    (Net(), Data(), {"max_micro_batch": 7}, 4, None, None),
    (hooked(Net, training_step=absurd)(), Data(), {}, 8, 16, None),
]


@pytest.mark.parametrize(("module", "data", "how", "fits", "fails", "rows"), FOUND)
def test_the_largest_size_that_fits_is_found_with_room_to_spare(
    module: Any, data: Data, how: Any, fits: int, fails: int | None, rows: int | None
) -> None:
    """pytorch-lightning#8954: a first size that does not fit is where it began."""
    result = found(module, data, **how)
    assert result.plan.micro_batch == fits
    assert result.plan.effective == how.get("target", TARGET)
    assert max(trial.size for trial in result.trials if trial.fits) == fits
    refused = [trial.size for trial in result.trials if not trial.fits]
    assert min(refused, default=None) == fails
    assert rows is None or rows in module.seen


ALONE = r"one row does not fit.*float64\[1, 4\].*smaller model\. .*memory"
REFUSED: list[Any] = [
    (limited(rows=0), ALONE),
    (limited(rows=0, where="backward"), ALONE),
    (hooked(Net, training_step=mistaken)(), "shapes cannot be multiplied|size mism"),
    (hooked(Limited, seen=[], limit=9, configure_optimizers=greedy)(), "one row does"),
]


@pytest.mark.parametrize(("module", "text"), REFUSED)
def test_what_does_not_fit_at_all_and_mistakes_are_shown(
    module: Any, text: str
) -> None:
    data, fit = Data(), quick()
    with pytest.raises((TrainkitError, RuntimeError), match=text) as error:
        found(module, data, fit)
    assert isinstance(error.value, TrainkitError) is ("one row" in text)
    assert (data.batch_size, fit.accumulate_grad_batches) == (4, 1)


def test_it_trains_with_what_was_found() -> None:
    """pytorch-lightning#13851: after the first size nothing was trained."""
    module, data, fit = limited(rows=5), Data(32), quick(max_epochs=1)
    start = weights(module)
    found(module, data, fit)
    module.seen.clear()
    fit.fit(module, data)
    assert set(module.seen) == {4}
    assert fit.global_step == 96 // 32
    assert not torch.equal(weights(module), start)


def test_validation_after_it_is_whole() -> None:
    """pytorch-lightning#18394, #18834: the finder leaves its own limit behind."""

    class Validated(Net):
        num_validated = 0

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.num_validated += len(batch[0])

    class Both(Data):
        def val_dataloader(self) -> Any:
            return DataLoader(rows(50), batch_size=5)  # type: ignore[arg-type]

    fit, module, data = quick(max_epochs=1, num_sanity_val_steps=0), Validated(), Both()
    found(module, data, fit)
    fit.fit(module, data)
    assert module.num_validated == 50


KEEPING: list[Any] = [
    lambda module, features: None,
    lambda module, features: setattr(module, "features", features),
    lambda module, features: module.all.append(features),
    lambda module, features: module.last.update(features=features),
]


@pytest.mark.parametrize("keep", KEEPING)
def test_what_did_not_fit_is_freed_before_the_next_size(keep: Any) -> None:
    """Also what the module has kept of it."""
    held: list[weakref.ref[Tensor]] = []
    still_there: list[bool] = []

    class Holding(Net):
        def __init__(self) -> None:
            super().__init__()
            self.all: list[Tensor] = []
            self.last: dict[str, Tensor] = {}

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            still_there.extend(each() is not None for each in held)
            held.clear()
            activations = self.net(batch[0])
            if len(activations) > 9:
                held.append(weakref.ref(activations))
                keep(self, activations)
                run_out()
            return super().training_step(batch, batch_idx)

    found(Holding(), Data(32))
    assert still_there == [False, False]


def test_the_longest_rows_are_tried() -> None:
    sequences = ragged_sequences(300, longest=60)
    shapes: list[tuple[int, int]] = []

    class Watching(TokenModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            shapes.append(tuple(batch["ids"].shape))
            return super().training_step(batch, batch_idx)

    loader = DataLoader(sequences, 8, collate_fn=pad)  # type: ignore[arg-type]
    found(Watching(), loader, target=8, max_micro_batch=8, margin=0.25)
    lengths = sorted((len(ids) for ids, _ in sequences[:64]), reverse=True)
    assert shapes == 2 * [(10, lengths[0])]


def test_a_list_of_samples_is_collated_by_the_users_own_function() -> None:
    class Listed(TokenModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            assert isinstance(batch, list)
            return super().training_step(pad(batch), batch_idx)

    loader = DataLoader(ragged_sequences(40), 4, collate_fn=list)  # type: ignore[arg-type]
    assert found(Listed(), loader, target=16).plan.effective == 16


def test_what_it_says(capsys: Any) -> None:
    data, fit = Data(), quick()
    result = find_micro_batch(fit, limited(rows=9), data, target=32)
    sizes = data.batch_size, fit.accumulate_grad_batches
    assert (result.micro_batch, result.accumulate) == sizes
    out = capsys.readouterr().out
    assert "trainkit | micro-batch 16: does not fit" in out
    assert "trainkit | micro-batch 8: fits" in out
    assert "= 32 (exactly the target)" in out
