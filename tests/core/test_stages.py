"""The stages of a schedule, and how many steps they make."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainkit.core.stages import Stages, StageUnit
from trainkit.errors import TrainkitError


@given(
    sizes=st.dictionaries(st.integers(0, 30), st.integers(1, 9), max_size=6),
    at=st.integers(0, 40),
)
def test_at_equals_the_last_start_that_has_been_reached(
    sizes: dict[int, int], at: int
) -> None:
    sizes = {0: 5, **sizes}
    expected = sizes[max(start for start in sizes if start <= at)]
    stages = Stages.make(dict(sorted(sizes.items(), reverse=True)))
    assert stages.at(at) == expected
    assert stages.at(at + 0.5) == expected
    assert stages.largest == max(sizes.values())


@given(
    start=st.integers(1, 20),
    end=st.integers(1, 20),
    over=st.integers(1, 60),
)
def test_ramp_goes_evenly_and_arrives(start: int, end: int, over: int) -> None:
    """Megatron's rampup-batch-size; in whole micro-batches, never ahead of the line."""
    stages = Stages.ramp(start, end, over, "step")
    sizes = [stages.at(i) for i in range(over + 5)]
    assert sizes[0] == start or over == 0
    assert set(sizes[over:]) == {end}
    assert sizes == sorted(sizes, reverse=end < start)
    for i in range(over):
        reached = math.floor(i * abs(end - start) / over)
        assert abs(sizes[i] - start) == reached


def steps_by_hand(
    stages: Stages, batches: int, epochs: int, limit: float, tokens: float
) -> int:
    """Micro-batch by micro-batch."""
    steps, seen, late = 0, 0.0, 0.0
    for epoch in range(epochs):
        left_in_window = taken = 0
        for index in range(batches):
            if left_in_window == 0:
                if steps >= limit:
                    return steps
                at = {"epoch": epoch, "step": steps, "tokens": late}[stages.unit]
                left_in_window, taken = stages.at(at), 0
            left_in_window -= 1
            taken += 1
            if left_in_window == 0 or index == batches - 1:
                steps += 1
                late, seen = seen, seen + taken * tokens
    return steps


@given(
    sizes=st.dictionaries(st.integers(1, 30), st.integers(1, 9), max_size=5),
    unit=st.sampled_from(["epoch", "step", "tokens"]),
    batches=st.integers(1, 20),
    epochs=st.integers(1, 6),
    limit=st.one_of(st.just(math.inf), st.integers(0, 30)),
)
def test_num_steps_equals_counting(
    sizes: dict[int, int], unit: StageUnit, batches: int, epochs: int, limit: float
) -> None:
    stages = Stages.make({0: 3, **sizes}, unit)
    counted = stages.num_steps(batches, epochs, max_steps=limit, tokens=1.5)
    assert counted == steps_by_hand(stages, batches, epochs, limit, 1.5)


@pytest.mark.parametrize("batches", [0, 1, 3, 4, 5, 8])
def test_num_steps_of_one_size_equals_the_ceiling(batches: int) -> None:
    """transformers#37777: also where the size divides the epoch."""
    assert Stages.make({0: 4}).num_steps(batches, 3) == 3 * math.ceil(batches / 4)


# ---- refusals ------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [{}, [], None, 4, "4"])
def test_what_is_no_plan_is_refused(sizes: Any) -> None:
    with pytest.raises(TrainkitError, match="must map a start to a window's size"):
        Stages.make(sizes)


@pytest.mark.parametrize(
    "sizes",
    [{0: 0}, {0: -1}, {0: 1.5}, {0: True}, {0: 2, -1: 3}, {0: 2, 1.5: 3}, {0: "4"}],
)
def test_what_is_no_whole_number_is_refused(sizes: Any) -> None:
    with pytest.raises(TrainkitError, match=r"a start must be a whole number.*\{"):
        Stages.make(sizes)


def test_a_plan_without_a_beginning_is_refused() -> None:
    with pytest.raises(TrainkitError, match=r"its first start is 3\. Add 0"):
        Stages.make({7: 1, 3: 2})


@pytest.mark.parametrize("unit", ["epochs", "samples", None])
def test_an_unknown_unit_is_refused(unit: Any) -> None:
    with pytest.raises(TrainkitError, match="unit: must be one of.*'step', 'tokens'"):
        Stages.make({0: 1}, unit)
    with pytest.raises(TrainkitError, match="unit: must be one of"):
        Stages.ramp(1, 2, 3, unit)


@pytest.mark.parametrize("name", ["start", "end", "over"])
@pytest.mark.parametrize("value", [0, -2, 1.5, True, None])
def test_an_impossible_ramp_is_refused(name: str, value: Any) -> None:
    options: dict[str, Any] = {"start": 1, "end": 4, "over": 10, name: value}
    with pytest.raises(TrainkitError, match=f"ramp {name}: must be a whole number"):
        Stages.ramp(**options, unit="step")


def test_tokens_without_their_mean_are_refused() -> None:
    with pytest.raises(TrainkitError, match="needs tokens_per_micro_batch="):
        Stages.make({0: 1}, "tokens").num_steps(10, 1)
