"""Which sizes are tried."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainkit import BatchPlan
from trainkit.lit.probe.search import DoesNotFit, Trial, search, sizes_for


def machine(
    *, fits_up_to: float = float("inf")
) -> tuple[Callable[[int], Trial], list[int]]:
    """Something that tries sizes, and the list of those tried."""
    tried: list[int] = []

    def attempt(size: int) -> Trial:
        tried.append(size)
        return Trial(size=size, fits=size <= fits_up_to)

    return attempt, tried


def largest(trials: list[Trial]) -> int:
    return max(trial.size for trial in trials if trial.fits)


@given(
    target=st.integers(1, 2000),
    world_size=st.integers(1, 8),
    largest=st.integers(1, 300),
)
def test_every_size_is_that_of_the_plan_it_makes(
    target: int, world_size: int, largest: int
) -> None:
    sizes = sizes_for(target=target, world_size=world_size, largest=largest)
    assert sizes
    for size in sizes:
        plan = BatchPlan.make(
            target=target, world_size=world_size, max_micro_batch=size
        )
        assert plan.micro_batch == size


@given(
    target=st.integers(1, 2000),
    start=st.integers(1, 2000),
    fits_up_to=st.integers(1, 2000),
)
def test_the_largest_that_fits_is_found(
    target: int, start: int, fits_up_to: int
) -> None:
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
    found = search([1, 2, 4, 8, 16], 16, attempt)
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
