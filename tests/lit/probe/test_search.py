"""Which sizes are tried and taken."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainkit import BatchPlan
from trainkit.lit.probe.search import (
    NOISE,
    DoesNotFit,
    Trial,
    choose,
    search,
    sizes_for,
)


def machine(
    *, fits_up_to: float = float("inf"), rate: Callable[[int], float] = float
) -> tuple[Callable[[int], Trial], list[int]]:
    """Something that tries sizes, and the list of those tried."""
    tried: list[int] = []

    def attempt(size: int) -> Trial:
        tried.append(size)
        if size > fits_up_to:
            return Trial(size=size, fits=False)
        return Trial(size=size, fits=True, samples_per_second=rate(size))

    return attempt, tried


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
def test_where_larger_is_faster_the_largest_that_fits_is_taken(
    target: int, start: int, fits_up_to: int
) -> None:
    sizes = sizes_for(target=target, world_size=1, largest=target)
    attempt, tried = machine(fits_up_to=fits_up_to, rate=lambda n: float(n * n))
    found = choose(search(sizes, start, attempt))
    assert found.size == max(size for size in sizes if size <= fits_up_to)
    assert found.size in tried, "a size that was not tried is no finding"
    assert len(tried) == len(set(tried)), "no size is tried twice"


def test_the_search_begins_where_the_user_is() -> None:
    attempt, tried = machine()
    search(sizes_for(target=512, world_size=1, largest=512), 48, attempt)
    assert tried[0] == 32


def test_a_start_that_does_not_fit_is_halved_down_to_one() -> None:
    attempt, tried = machine(fits_up_to=1)
    found = choose(search([1, 2, 4, 8, 16], 16, attempt))
    assert tried == [16, 8, 4, 2, 1]
    assert found.size == 1


def test_nothing_fits() -> None:
    attempt, _ = machine(fits_up_to=0)
    with pytest.raises(DoesNotFit):
        search([1, 2, 4], 4, attempt)


def test_between_what_fits_and_what_does_not_every_size_counts() -> None:
    """720 has thirty divisors: doubling alone would stop at 48, and 90 fits."""
    attempt, tried = machine(fits_up_to=100, rate=lambda n: float(n * n))
    sizes = sizes_for(target=720, world_size=1, largest=720)
    assert choose(search(sizes, 3, attempt)).size == 90
    assert len(tried) < 12


def test_on_equal_speed_the_smallest_that_was_tried_is_taken() -> None:
    attempt, _ = machine(rate=lambda n: 100.0 * (1 + 0.9 * NOISE * (n > 8)))
    assert choose(search([1, 2, 4, 8, 16, 32], 8, attempt)).size == 8


def test_the_fastest_is_taken_where_the_largest_fits_too() -> None:
    attempt, tried = machine(rate=lambda n: 100.0 - abs(n - 16))
    sizes = [2**i for i in range(12)]
    assert choose(search(sizes, 4, attempt)).size == 16
    assert max(tried) <= 64, "the search ends where larger sizes are no faster"
