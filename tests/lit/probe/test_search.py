"""Which sizes are tried."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from trainkit import BatchPlan
from trainkit.lit.probe.search import (
    Trial,
    search,
    sizes_for,
)


def machine(
    *, fits_up_to: float = float("inf")
) -> tuple[Callable[[int], Trial], list[int]]:
    """Something that tries sizes, and the list of those tried."""
    tried: list[int] = []

    def attempt(size: int) -> Trial:
        tried.append(size)
        return Trial(size=size, fits=size <= fits_up_to)

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


@given(target=st.integers(1, 2000), fits_up_to=st.integers(0, 2000))
def test_the_largest_that_fits_is_found(target: int, fits_up_to: int) -> None:
    sizes = sizes_for(target=target, world_size=1, largest=target)
    attempt, tried = machine(fits_up_to=fits_up_to)
    found = search(sizes, attempt)
    fitting = [trial.size for trial in found if trial.fits]
    assert fitting[-1:] == [size for size in sizes if size <= fits_up_to][-1:]
    assert sorted(tried) == [trial.size for trial in found], "what is said was tried"
    assert len(tried) == len(set(tried)), "no size is tried twice"
    assert len(tried) <= len(sizes).bit_length()


def test_between_what_fits_and_what_does_not_every_size_counts() -> None:
    """720 has thirty divisors: doubling alone would stop at 48, and 90 fits."""
    attempt, _ = machine(fits_up_to=100)
    sizes = sizes_for(target=720, world_size=1, largest=720)
    assert max(trial.size for trial in search(sizes, attempt) if trial.fits) == 90
