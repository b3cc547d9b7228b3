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
from tests.lit.probe.finding import Data, Net, found, limited, quick, rows, run_out
from tests.zoo.modules import Stream
from trainkit import BatchPlan
from trainkit.errors import TrainkitError
from trainkit.lit.probe.attempt import DoesNotFit, Trial, search, sizes_for
from trainkit.lit.probe.rows import LEAST, Rows, num_elements

# ---- which sizes are tried -----------------------------------------------------------


def machine(fits_up_to: float = math.inf) -> tuple[Any, list[int]]:
    """Something that tries sizes, and the list of those tried."""
    tried: list[int] = []

    def attempt(size: int) -> Trial:
        tried.append(size)
        return Trial(size=size, fits=size <= fits_up_to)

    return attempt, tried


def largest(trials: list[Trial]) -> int:
    return max(trial.size for trial in trials if trial.fits)


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


def test_the_search_begins_where_the_user_is() -> None:
    attempt, tried = machine()
    search(sizes_for(target=512, world_size=1, largest=512), 48, attempt)
    assert tried[0] == 32


def test_a_start_that_does_not_fit_is_halved_down_to_one() -> None:
    attempt, tried = machine(fits_up_to=1)
    found = search([1, 2, 3, 4, 6, 8, 12, 16], 16, attempt)
    assert tried == [16, 8, 4, 2, 1]
    assert largest(found) == 1


def test_nothing_fits() -> None:
    attempt, _ = machine(fits_up_to=0)
    with pytest.raises(DoesNotFit):
        search([1, 2, 4], 4, attempt)


def test_between_what_fits_and_what_does_not_every_size_counts() -> None:
    """720 has thirty divisors: doubling alone would stop at 48, and 90 fits."""
    attempt, tried = machine(fits_up_to=100)
    sizes = sizes_for(target=720, world_size=1, largest=720)
    assert largest(search(sizes, 3, attempt)) == 90
    assert len(tried) < 12


# ---- rows are those of the loader, put together by its own function ------------------


def test_batches_are_made_by_the_loaders_own_function() -> None:
    loader = DataLoader(ragged_sequences(20), 5, collate_fn=pad)  # type: ignore[arg-type]
    longest = sorted(ragged_sequences(20), key=num_elements, reverse=True)[:5]
    for name, tensor in Rows(loader).longest(5).items():
        assert torch.equal(tensor, pad(longest)[name])


def test_the_longest_come_first_and_round_again() -> None:
    rows = Rows(DataLoader([[1], [1, 2, 3], [1, 2]], 2, collate_fn=list))  # type: ignore[arg-type]
    assert rows.longest(4) == [[1, 2, 3], [1, 2], [1], [1, 2, 3]]


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


def test_a_data_set_that_is_asked_for_several_rows_at_once() -> None:
    class Data:
        def __len__(self) -> int:
            return 3

        def __getitems__(self, indices: list[int]) -> Any:
            return [index * 10 for index in indices]

    assert Rows(DataLoader(Data(), 3, collate_fn=list)).longest(3) == [0, 10, 20]  # type: ignore[arg-type]


def test_a_stream_has_no_known_end_and_goes_round() -> None:
    rows = Rows(DataLoader(Stream(range(3)), 2, collate_fn=list))
    assert len(rows) > 10**9
    assert rows.longest(4) == [0, 1, 2, 0]


def test_a_plain_batch_sampler_is_read_through() -> None:
    sampler = BatchSampler(SequentialSampler(range(7)), 2, drop_last=False)
    rows = Rows(DataLoader(range(7), batch_sampler=sampler, collate_fn=list))  # type: ignore[arg-type]
    assert len(rows) == 7
    assert rows.longest(3) == [0, 1, 2]


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


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("start", [1, 4, 32])
def test_the_largest_is_found_from_above_and_below(where: str, start: int) -> None:
    """pytorch-lightning#8954: a first size that does not fit is where it began."""
    module, data = limited(rows=9, where=where), Data(start)
    result = found(module, data)
    assert (result.plan.micro_batch, result.plan.accumulate) == (8, 4)
    assert {t.size: t.fits for t in result.trials}[16] is False
    assert 8 + 1 in module.seen, "what is taken was tried (orobix/quadra#118)"


@pytest.mark.parametrize(("margin", "size"), [(0.0, 8), (0.1, 4), (0.5, 4)])
def test_a_size_is_proven_by_more_rows_than_it_has(margin: float, size: int) -> None:
    """pytorch-lightning#8028, #9625: what just fitted runs out while training."""
    module = limited(rows=8)
    result = found(module, Data(), margin=margin)
    assert result.plan.micro_batch == size
    assert result.plan.effective == 32


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


def test_no_size_is_larger_than_the_data_set() -> None:
    """orobix/quadra#118: a batch of all rows proves nothing about larger ones."""
    module, data = Net(), Data(number=10)
    result = found(module, data, target=64)
    assert max(trial.size for trial in result.trials) == 8
    assert result.plan.effective == 64


def test_max_micro_batch_is_a_cap() -> None:
    result = found(Net(), Data(), max_micro_batch=7)
    assert max(trial.size for trial in result.trials) == 4


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_one_row_that_does_not_fit_alone_is_shown(where: str) -> None:
    module, data, fit = limited(rows=0, where=where), Data(), quick()
    text = r"one row does not fit.*float64\[1, 4\].*smaller model\. .*memory"
    with pytest.raises(TrainkitError, match=text):
        found(module, data, fit)
    assert (data.batch_size, fit.accumulate_grad_batches) == (4, 1)


def test_an_optimizer_whose_state_does_not_fit_is_found_out() -> None:
    class Greedy(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if closure is not None:
                closure()
            run_out()

    class Unbounded(type(limited(rows=100))):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            return Greedy(self.parameters(), lr=0.1)

    with pytest.raises(TrainkitError, match="one row does not fit"):
        found(Unbounded(), Data(1))


def test_the_cpu_allocators_own_error_is_known() -> None:
    class Absurd(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if len(batch[0]) > 9:
                torch.empty(2**60)
            return super().training_step(batch, batch_idx)

    assert found(Absurd(), Data()).plan.micro_batch == 8


def test_what_did_not_fit_is_freed_before_the_next_size() -> None:
    held: list[weakref.ref[Tensor]] = []
    still_there: list[bool] = []

    class Holding(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            still_there.extend(each() is not None for each in held)
            held.clear()
            activations = self.net(batch[0])
            if len(activations) > 9:
                held.append(weakref.ref(activations))
                run_out()
            return super().training_step(batch, batch_idx)

    found(Holding(), Data(32))
    assert still_there == [False, False]


def test_an_error_of_another_kind_goes_on() -> None:
    """A shape that is wrong is no lack of memory, however large the batch."""

    class Mistaken(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return batch[0] @ batch[0]

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied|size mismatch"):
        found(Mistaken(), Data())


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
