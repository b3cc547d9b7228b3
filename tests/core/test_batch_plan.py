"""From an effective batch to micro-batches and accumulation."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainkit.core.batch_plan import NEARBY, BatchPlan
from trainkit.errors import TrainkitError

numbers = st.integers(1, 60)


def every_plan(
    target: int, world_size: int, max_micro_batch: int
) -> list[tuple[int, int, int]]:
    """By brute force: distance, micro-batches and effective batch of all plans."""
    return [
        (abs(micro * accumulate * world_size - target), accumulate, micro)
        for micro in range(1, max_micro_batch + 1)
        for accumulate in range(1, target + 2)
    ]


@given(target=st.integers(1, 150), world_size=numbers, max_micro_batch=numbers)
def test_plan_equals_the_best_by_brute_force(
    target: int, world_size: int, max_micro_batch: int
) -> None:
    plan = BatchPlan.make(
        target=target, world_size=world_size, max_micro_batch=max_micro_batch
    )
    found = (abs(plan.effective - target), plan.accumulate, plan.micro_batch)
    assert found == min(every_plan(target, world_size, max_micro_batch))


@given(
    target=st.integers(1, 10**6),
    world_size=st.integers(1, 5000),
    max_micro_batch=st.integers(1, 10**6),
)
def test_it_is_exact_iff_the_ranks_share_the_target_evenly(
    target: int, world_size: int, max_micro_batch: int
) -> None:
    plan = BatchPlan.make(
        target=target, world_size=world_size, max_micro_batch=max_micro_batch
    )
    assert plan.effective == plan.micro_batch * plan.accumulate * world_size
    assert plan.effective_batch.size == plan.effective
    assert plan.micro_batch <= max_micro_batch
    assert plan.exact == (plan.effective == target) == (target % world_size == 0)
    # The nearest multiple of world_size; 0 is none.
    distance = abs(plan.effective - target)
    assert distance * 2 <= world_size or plan.effective == world_size > target


@pytest.mark.parametrize(
    ("target", "world_size", "largest", "micro_batch", "accumulate", "effective"),
    [
        (512, 4, 24, 16, 8, 512),
        (512, 4, 128, 128, 1, 512),
        (512, 4, 1000, 128, 1, 512),
        (127, 1, 24, 1, 127, 127),  # prime: exact, dreadful
        (1000, 3, 24, 9, 37, 999),
        (1001, 3, 24, 2, 167, 1002),
        (10, 4, 8, 2, 1, 8),  # 8 and 12 are as near: the smaller
        (14, 4, 2, 2, 2, 16),  # 12 = 1 x 3 and 16 = 2 x 2 are as near: the cheaper
        (3, 8, 4, 1, 1, 8),  # a rank has at least one sample
        (1, 1, 1, 1, 1, 1),
    ],
)
def test_plans_that_are_known(
    target: int,
    world_size: int,
    largest: int,
    micro_batch: int,
    accumulate: int,
    effective: int,
) -> None:
    plan = BatchPlan.make(target=target, world_size=world_size, max_micro_batch=largest)
    assert (plan.micro_batch, plan.accumulate) == (micro_batch, accumulate)
    assert (plan.effective, plan.exact) == (effective, effective == target)


def test_the_largest_numbers_take_no_time() -> None:
    """A trillion, and the largest prime below it."""
    for target in (10**12, 999_999_999_989):
        plan = BatchPlan.make(target=target, max_micro_batch=10**11)
        assert plan.effective == target
        near = plan.nearby()
        assert near is None or abs(near.effective - target) <= NEARBY * target


@given(target=st.integers(1, 400), world_size=st.integers(1, 9), largest=numbers)
def test_nearby_equals_the_nearest_by_brute_force(
    target: int, world_size: int, largest: int
) -> None:
    plan = BatchPlan.make(target=target, world_size=world_size, max_micro_batch=largest)
    fits = min(largest, math.ceil(target / world_size))
    cheaper = [
        (distance, accumulate, micro)
        for distance, accumulate, micro in every_plan(target, world_size, fits)
        if distance <= NEARBY * target
        and 2 * accumulate <= plan.accumulate
        and micro > fits // 2
    ]
    near = plan.nearby()
    if near is None:
        assert not cheaper
    else:
        found = (abs(near.effective - target), near.accumulate, near.micro_batch)
        assert found == min(cheaper)


@pytest.mark.parametrize(
    ("target", "micro_batch", "accumulate"), [(127, 21, 6), (1009, 24, 42)]
)
def test_a_prime_has_something_near(
    target: int, micro_batch: int, accumulate: int
) -> None:
    near = BatchPlan.make(target=target, max_micro_batch=24).nearby()
    assert near is not None
    assert (near.micro_batch, near.accumulate) == (micro_batch, accumulate)
    assert (abs(near.effective - target), near.exact) == (1, False)


def test_nearby_is_silent_where_it_would_buy_little() -> None:
    assert BatchPlan.make(target=128, max_micro_batch=24).nearby() is None


@pytest.mark.parametrize("name", ["target", "world_size", "max_micro_batch"])
@pytest.mark.parametrize("value", [0, -4, 1.0, 24.5, True, None, "8", math.nan, 10**13])
def test_what_is_no_whole_number_is_refused(name: str, value: Any) -> None:
    options: dict[str, Any] = {"target": 8, "world_size": 1, "max_micro_batch": 8}
    with pytest.raises(
        TrainkitError, match=f"BatchPlan {name}: must be a whole number from 1 to "
    ) as refused:
        BatchPlan.make(**options | {name: value})
    assert f"received {value!r}." in str(refused.value)


def test_a_plan_that_is_written_down_is_checked_too() -> None:
    plan = BatchPlan.make(target=512, world_size=4, max_micro_batch=24)
    with pytest.raises(TrainkitError, match="BatchPlan accumulate: must be a whole"):
        replace(plan, accumulate=0)
    with pytest.raises(
        TrainkitError, match="must be at most max_micro_batch, 24, received 32"
    ):
        replace(plan, micro_batch=32)


@pytest.mark.parametrize(
    ("rule", "rate"),
    [
        ("linear", 0.2),
        ("sqrt", 0.1 * math.sqrt(2)),
        ("adam-sde", 0.1 * math.sqrt(2)),
        ("half-life", 0.1),
        ("none", 0.1),
        (lambda k: k**3, 0.8),
    ],
)
def test_rate_equals_the_rules(rule: Any, rate: float) -> None:
    plan = BatchPlan.make(target=512, world_size=4, max_micro_batch=24)
    scaled = plan.scaled_rate(0.1, reference_batch=256, rule=rule)
    assert scaled == pytest.approx(rate, rel=1e-15)


def test_the_rate_follows_what_is_made_and_not_what_was_meant() -> None:
    plan = BatchPlan.make(target=10, world_size=4, max_micro_batch=8)
    assert plan.scaled_rate(1.0, reference_batch=8, rule="linear") == 1.0


def test_a_rate_that_cannot_be_scaled_is_refused() -> None:
    plan = BatchPlan.make(target=512, world_size=4, max_micro_batch=24)
    for rule in ("auto", "gain"):
        with pytest.raises(TrainkitError, match=f"'{rule}' asks the optimizer, and a"):
            plan.scaled_rate(0.1, reference_batch=256, rule=rule)
    with pytest.raises(TrainkitError, match="rule: must be one of .* received 'cubic'"):
        plan.scaled_rate(0.1, reference_batch=256, rule="cubic")
    with pytest.raises(TrainkitError, match="reference_batch: must be a positive"):
        plan.scaled_rate(0.1, reference_batch=0, rule="linear")
