"""The effective batch, the plan that makes it, and an epoch against torch's loader."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from itertools import chain, product
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from trainkit import BatchPlan, EffectiveBatch, EpochPlan
from trainkit.core.plan.options import brief
from trainkit.errors import TrainkitError

numbers = st.integers(1, 60)


def plan(target: int = 512, world_size: int = 4, largest: int = 24) -> BatchPlan:
    sizes = {"target": target, "world_size": world_size, "max_micro_batch": largest}
    return BatchPlan.make(**sizes)


rate = partial(plan().scaled_rate, 0.1, reference_batch=256)


def ranked(one: BatchPlan) -> tuple[int, int, int]:
    return abs(one.effective - one.target), one.accumulate, one.micro_batch


@settings(deadline=None)
@example(14, 4, 2)  # 12 = 1 x 3 and 16 = 2 x 2 are as near: the cheaper
@example(10, 4, 8)  # 8 and 12 are as near: the smaller
@given(target=st.integers(1, 150), ranks=numbers, largest=numbers)
def test_plan_equals_the_best_by_brute_force(
    target: int, ranks: int, largest: int
) -> None:
    every = [  # distance, micro-batches, and their size
        (abs(micro * accumulate * ranks - target), accumulate, micro)
        for micro, accumulate in product(range(1, largest + 1), range(1, target + 2))
    ]
    made = plan(target, ranks, largest)
    assert ranked(made) == min(every)
    assert made.effective == made.micro_batch * made.accumulate * ranks
    batch = made.effective_batch
    assert (batch.size, type(batch.size)) == (made.effective, int)
    assert made.exact == (target % ranks == 0)


@pytest.mark.parametrize("target", [10**12, 999_999_999_989])
def test_a_trillion_and_the_largest_prime_below_it_take_no_time(target: int) -> None:
    assert plan(target, 1, 10**11).effective == target


@pytest.mark.parametrize(
    ("rule", "factor"),
    [
        ("linear", 2),
        ("sqrt", 2**0.5),
        ("adam-sde", 2**0.5),
        ("half-life", 1),
        ("none", 1),
        (lambda k: k**3, 8),
    ],
)
def test_rate_equals_the_rules_for_the_batch_that_is_made(
    rule: Any, factor: float
) -> None:
    rounded = plan(10, largest=8)  # 8 samples, where 10 cannot be made
    for made, reference in ((plan(), 256), (rounded, 4)):
        scaled = made.scaled_rate(0.1, reference_batch=reference, rule=rule)
        assert scaled == pytest.approx(0.1 * factor, rel=1e-15)


def test_a_measured_batch_says_so() -> None:
    batch = EffectiveBatch(micro_batch=7.6, accumulate=2, unit="tokens")
    text = "per-device batch 7.6 x accumulation 2 x ranks 1 = 15.2 tokens a step"
    assert (str(batch), batch.is_exact, batch.over(4)) == (text, True, 3.8)
    for windows, ending in ((1, "window"), (8, "windows")):
        measured = replace(batch, windows_measured=windows)
        assert str(measured) == f"{text} (measured over {windows} {ending})"
        assert not measured.is_exact


def test_brief_writes_as_a_person_would() -> None:
    numbers = (1e-8, 9999.4, 9999.6, math.inf, math.nan, 2**20, -3.0, 1e15)
    written = "1e-08 9999 10,000 inf nan 1,048,576 -3 1,000,000,000,000,000"
    assert [brief(number) for number in numbers] == written.split()


@settings(deadline=None)
@given(
    samples=st.integers(1, 50),
    micro=st.integers(1, 5),
    accumulate=st.integers(1, 5),
    ranks=st.integers(1, 4),
    drop_last=st.booleans(),
)
def test_epoch_equals_what_loaders_yield(
    samples: int, micro: int, accumulate: int, ranks: int, drop_last: bool
) -> None:
    assume(not drop_last or samples > (micro - 1) * ranks)  # something is left
    sizes = {"micro_batch": micro, "accumulate": accumulate, "world_size": ranks}
    epoch = EpochPlan.make(samples, **sizes, drop_last=drop_last)
    data: Any = range(samples)
    windows = []
    for rank in range(ranks):
        sampler = DistributedSampler(data, ranks, rank)
        loader: Any = DataLoader(data, micro, sampler=sampler, drop_last=drop_last)
        # A window is as many micro-batches as there are, up to `accumulate`.
        windows.append(list(BatchSampler(loader, accumulate, drop_last=False)))
        assert epoch.num_steps == len(windows[rank])
        assert epoch.num_micro_batches == sum(map(len, windows[rank]))
        assert epoch.last_window_micro_batches == len(windows[rank][-1])
    *whole, last = (sum(map(len, chain(*step))) for step in zip(*windows, strict=True))
    full = micro * accumulate * ranks
    assert all(size == full for size in whole)
    assert (epoch.last_window_samples, epoch.is_short) == (last, last < full)
    gone = epoch.num_dropped_samples - epoch.num_repeated_samples
    assert sum(whole) + last == samples - gone
    assert 0 <= epoch.num_repeated_samples < ranks
    made = replace(plan(1, ranks), micro_batch=micro, accumulate=accumulate)
    assert made.epoch(samples, drop_last=drop_last) == epoch


# ---- refusals ------------------------------------------------------------------------


MADE = [
    (partial(BatchPlan.make, target=8, max_micro_batch=8), "BatchPlan target"),
    (partial(BatchPlan.make, target=8, max_micro_batch=8), "BatchPlan world_size"),
    (partial(BatchPlan.make, target=8), "BatchPlan max_micro_batch"),
    (partial(replace, plan()), "BatchPlan accumulate"),
    (partial(EpochPlan.make, micro_batch=1, accumulate=1), "EpochPlan num_samples"),
    (partial(EpochPlan.make, 8, accumulate=1), "EpochPlan micro_batch"),
    (partial(EpochPlan.make, 8, micro_batch=1), "EpochPlan accumulate"),
    (partial(plan().epoch, drop_last=True), "EpochPlan num_samples"),
    (partial(EffectiveBatch, micro_batch=8), "EffectiveBatch accumulate"),
    (partial(EffectiveBatch, micro_batch=8), "EffectiveBatch replicas"),
]


@pytest.mark.parametrize("value", [0, -4, 1.0, True, None, "8", math.nan, 10**13])
@pytest.mark.parametrize(("make", "option"), MADE)
def test_what_is_no_whole_number_is_refused(make: Any, option: str, value: Any) -> None:
    with pytest.raises(TrainkitError) as refused:
        make(**{option.split()[1]: value})
    rule = "must be a whole number from 1 to 1,000,000,000,000"
    assert str(refused.value) == f"{option}: {rule}, received {value!r}."


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, None, "8", True, [8]])
def test_what_is_no_size_is_refused(value: Any) -> None:
    with pytest.raises(TrainkitError, match="micro_batch: must be a positive number"):
        EffectiveBatch(micro_batch=value)
    with pytest.raises(TrainkitError, match="reference_batch: must be a positive"):
        plan().scaled_rate(0.1, reference_batch=value, rule="linear")


@pytest.mark.parametrize(
    ("make", "options", "text"),
    [
        (partial(replace, plan()), {"micro_batch": 32}, "at most max_micro.* 24, rec"),
        (plan().epoch, {"num_samples": 60, "drop_last": True}, "nothing of 60 .* 15,"),
        (EffectiveBatch, {"micro_batch": 8, "unit": "pixels"}, "unit: must be one of"),
        (rate, {"rule": "auto"}, "'auto' asks the optimizer, and a plan does not"),
        (rate, {"rule": "gain"}, "'gain' asks the optimizer, and a plan does not"),
        (rate, {"rule": "cubic"}, "rule: must be one of .* received 'cubic'"),
    ],
)
def test_what_cannot_be_made_is_refused(make: Any, options: Any, text: str) -> None:
    with pytest.raises(TrainkitError, match=text):
        make(**options)
