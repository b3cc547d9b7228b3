"""The effective batch, the plan that makes it, an epoch against torch's loader; and the
stages of a schedule, their windows, and how many steps they make."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from functools import partial
from itertools import chain, product
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from tests.zoo.callbacks import SENT
from trainkit import BatchPlan, EffectiveBatch
from trainkit.core.plan.options import brief
from trainkit.core.plan.stages import Stages, StageUnit, WindowSize
from trainkit.errors import TrainkitError

numbers = st.integers(1, 60)


def plan(target: int = 512, world_size: int = 4, largest: int = 24) -> BatchPlan:
    sizes = {"target": target, "world_size": world_size, "max_micro_batch": largest}
    return BatchPlan.make(**sizes)


def ranked(one: BatchPlan) -> tuple[int, int, int]:
    return abs(one.effective - one.target), one.accumulate, one.micro_batch


@settings(deadline=None)
@example(14, 4, 2)  # 12 = 1 x 3 and 16 = 2 x 2 are as near: the cheaper
@example(10, 4, 8)  # 8 and 12 are as near: the smaller
@given(target=st.integers(1, 150), ranks=numbers, largest=numbers)
def test_plan_equals_the_best_of_all(target: int, ranks: int, largest: int) -> None:
    every = [  # distance, micro-batches, and their size
        (abs(micro * accumulate * ranks - target), accumulate, micro)
        for micro, accumulate in product(range(1, largest + 1), range(1, target + 2))
    ]
    made = plan(target, ranks, largest)
    assert ranked(made) == min(every)
    assert made.effective == made.micro_batch * made.accumulate * ranks
    assert made.exact == (target % ranks == 0)


@pytest.mark.parametrize("target", [10**12, 999_999_999_989])
def test_a_trillion_and_the_largest_prime_below_it_take_no_time(target: int) -> None:
    assert plan(target, 1, 10**11).effective == target


def test_a_batch_says_what_it_is_made_of() -> None:
    batch = EffectiveBatch(micro_batch=7.6, accumulate=2, unit="tokens")
    text = "per-device batch 7.6 x accumulation 2 x ranks 1 = 15.2 tokens a step"
    assert (str(batch), batch.over(4)) == (text, 3.8)


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
)
def test_epoch_equals_what_loaders_yield(
    samples: int, micro: int, accumulate: int, ranks: int
) -> None:
    made = replace(plan(1, ranks), micro_batch=micro, accumulate=accumulate)
    epoch = made.epoch(samples)
    data: Any = range(samples)
    windows = []
    for rank in range(ranks):
        sampler = DistributedSampler(data, ranks, rank)
        loader: Any = DataLoader(data, micro, sampler=sampler)
        # A window is as many micro-batches as there are, up to `accumulate`.
        windows.append(list(BatchSampler(loader, accumulate, drop_last=False)))
        assert epoch.num_steps == len(windows[rank])
        assert epoch.num_micro_batches == sum(map(len, windows[rank]))
    *whole, last = (sum(map(len, chain(*step))) for step in zip(*windows, strict=True))
    assert all(size == made.effective for size in whole)
    assert epoch.last_window_samples == last
    assert epoch.is_short == (last < made.effective)
    assert 0 <= sum(whole) + last - samples < ranks  # these are read twice


# ---- refusals ------------------------------------------------------------------------


MADE = [
    (partial(BatchPlan.make, target=8, max_micro_batch=8), "BatchPlan target"),
    (partial(BatchPlan.make, target=8, max_micro_batch=8), "BatchPlan world_size"),
    (partial(BatchPlan.make, target=8), "BatchPlan max_micro_batch"),
    (partial(replace, plan()), "BatchPlan accumulate"),
    (plan().epoch, "BatchPlan.epoch num_samples"),
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
        EffectiveBatch(micro_batch=8).over(value)


@pytest.mark.parametrize(
    ("make", "options", "text"),
    [
        (partial(replace, plan()), {"micro_batch": 32}, "at most max_micro.* 24, rec"),
        (EffectiveBatch, {"micro_batch": 8, "unit": "pixels"}, "unit: must be one of"),
    ],
)
def test_what_cannot_be_made_is_refused(make: Any, options: Any, text: str) -> None:
    with pytest.raises(TrainkitError, match=text):
        make(**options)


# ---- the stages of a schedule --------------------------------------------------------


@given(
    sizes=st.dictionaries(st.integers(0, 30), st.integers(1, 9), max_size=6),
    at=st.integers(0, 40),
)
def test_at_equals_the_last_start_reached(sizes: dict[int, int], at: int) -> None:
    sizes = {0: 5, **sizes}
    expected = sizes[max(start for start in sizes if start <= at)]
    stages = Stages.make(dict(sorted(sizes.items(), reverse=True)))
    assert stages.at(at) == stages.at(at + 0.5) == expected


@given(start=st.integers(1, 20), end=st.integers(1, 20), over=st.integers(1, 60))
def test_ramp_goes_evenly_and_arrives(start: int, end: int, over: int) -> None:
    """Megatron's rampup-batch-size; in whole micro-batches, never ahead of the line."""
    stages = Stages.ramp(start, end, over, "step")
    sizes = [stages.at(i) for i in range(over + 5)]
    assert set(sizes[over:]) == {end}
    assert sizes == sorted(sizes, reverse=end < start)
    for i in range(over):
        assert abs(sizes[i] - start) == math.floor(i * abs(end - start) / over)


def by_hand(stages: Stages, batches: int, epochs: int, tokens: float) -> int:
    """Windows, micro-batch by micro-batch; tokens are read one window late."""
    step, seen, late = 0, 0.0, 0.0
    for epoch in range(epochs):
        left = taken = 0
        for index in range(batches):
            if left == 0:
                at = {"epoch": epoch, "step": step, "tokens": late}[stages.unit]
                left, taken = stages.at(at), 0
            left -= 1
            taken += 1
            if left == 0 or index == batches - 1:
                step += 1
                late, seen = seen, seen + taken * tokens
    return step


@settings(deadline=None)
@given(
    sizes=st.dictionaries(st.integers(1, 30), st.integers(1, 9), max_size=5),
    unit=st.sampled_from(["epoch", "step", "tokens"]),
    batches=st.integers(1, 20),
    epochs=st.integers(1, 6),
    limit=st.one_of(st.just(math.inf), st.integers(0, 30)),
)
def test_number_of_windows_equals_counting(
    sizes: dict[int, int], unit: StageUnit, batches: int, epochs: int, limit: float
) -> None:
    stages = Stages.make({0: 3, **sizes}, unit)
    counted = by_hand(stages, batches, epochs, 1.5)
    found = stages.num_steps(batches, epochs, max_steps=limit, tokens=1.5)
    assert found == min(counted, limit)


@pytest.mark.parametrize("batches", [0, 1, 3, 4, 5, 8])
def test_num_steps_of_one_size_equals_the_ceiling(batches: int) -> None:
    """transformers#37777: also where the size divides the epoch."""
    assert Stages.make({0: 4}).num_steps(batches, 3) == 3 * math.ceil(batches / 4)


@pytest.mark.parametrize(
    "sizes",
    [
        *({}, [], None, 4, "4", {0: 0}, {0: -1}, {0: 1.5}, {0: True}, {False: 2}),
        *({0: 2, -1: 3}, {0: 2, 1.5: 3}, {0: "4"}, {7: 1, 3: 2}),
    ],
)
def test_what_are_no_stages_is_refused(sizes: Any) -> None:
    with pytest.raises(TrainkitError) as refused:
        Stages.make(sizes, "step")
    said = str(refused.value)
    assert f"must map a start to a window's size, received {sizes!r}. A start" in said
    assert "one start is 0: {0: 8, 10: 4} means 8" in said
    assert "4 from step 10 on" in said


@pytest.mark.parametrize("value", [0, -2, 1.5, True, None])
def test_other_options_that_make_no_stages_are_refused(value: Any) -> None:
    for name in ("start", "end", "over"):
        options: dict[str, Any] = {"start": 1, "end": 4, "over": 10, name: value}
        with pytest.raises(TrainkitError, match=f"ramp {name}: must be a whole number"):
            Stages.ramp(**options, unit="step")
    with pytest.raises(TrainkitError, match="unit: must be one of.*'step', 'tokens'"):
        Stages.ramp(1, 2, 3, value)
    with pytest.raises(TrainkitError, match="needs tokens_per_micro_batch="):
        Stages.make({0: 1}, "tokens").num_steps(10, 1)


# ---- a window's size that knows where windows began ----------------------------------


@pytest.mark.parametrize("first", [0, 1, 4, 9])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_remainder_equals_the_place_in_the_window(size: int, first: int) -> None:
    """yolov5#3722: with a plain number the place depends on where the epoch began."""
    window, indices = WindowSize(size, first), range(first, first + 3 * size)
    places = [batch_idx % window for batch_idx in indices]
    assert places == 3 * list(range(size))
    plain = [batch_idx % size for batch_idx in indices]
    assert (plain == places) == (first % size == 0)


@pytest.mark.parametrize("copied", [lambda size: size, copy.copy, *SENT.values()])
def test_in_all_else_it_is_a_number_and_copies_equal_it(copied: Any) -> None:
    size = copied(WindowSize(3, 4))
    assert (type(size), size, size.first_batch, 6 % size) == (WindowSize, 3, 4, 2)
    assert (size + 1, 2 * size, 12 / size, -size) == (4, 6, 4.0, -3)
    assert (size % 2, 7 // size) == (1, 2)
    assert (str(size), repr(size), f"{size:02}", hash(size)) == ("3", "3", "03", 3)
    assert WindowSize(3, 1) == size == 3
    assert (list(range(size)), type(int(size))) == ([0, 1, 2], int)
