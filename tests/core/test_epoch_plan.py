"""How many steps an epoch takes, counted against torch's own loader."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler

from trainkit.core.batch_plan import BatchPlan
from trainkit.core.epoch_plan import EpochPlan
from trainkit.errors import TrainkitError


class Rows(Dataset[int]):
    def __init__(self, number: int) -> None:
        self.number = number

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> int:
        return index


def windows_of_ranks(
    num_samples: int,
    micro_batch: int,
    accumulate: int,
    world_size: int,
    drop_last: bool,
) -> list[list[list[list[int]]]]:
    """For each rank its windows: lists of micro-batches, which are lists of samples."""
    data = Rows(num_samples)
    ranks = []
    for rank in range(world_size):
        loader = DataLoader(
            data,
            batch_size=micro_batch,
            sampler=DistributedSampler(data, world_size, rank),
            drop_last=drop_last,
            collate_fn=list,
        )
        # A window is as many micro-batches as there are, up to `accumulate`.
        ranks.append(list(BatchSampler(loader, accumulate, drop_last=False)))  # type: ignore[arg-type]
    return ranks


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("accumulate", [1, 2, 5])
@pytest.mark.parametrize("micro_batch", [1, 3, 4])
@pytest.mark.parametrize("num_samples", [12, 13, 31])
def test_epoch_equals_what_loaders_yield(
    num_samples: int,
    micro_batch: int,
    accumulate: int,
    world_size: int,
    drop_last: bool,
) -> None:
    options: dict[str, Any] = {
        "micro_batch": micro_batch,
        "accumulate": accumulate,
        "world_size": world_size,
        "drop_last": drop_last,
    }
    epoch = EpochPlan.make(num_samples, **options)
    ranks = windows_of_ranks(num_samples, **options)
    for windows in ranks:
        assert epoch.num_steps == len(windows)
        assert epoch.num_micro_batches == sum(map(len, windows))
        assert epoch.last_window_micro_batches == len(windows[-1])
    sizes = [
        sum(len(samples) for samples in chain(*step))
        for step in zip(*ranks, strict=True)
    ]
    assert epoch.last_window_samples == sizes[-1]
    assert epoch.is_short == (sizes[-1] < micro_batch * accumulate * world_size)
    assert all(size == micro_batch * accumulate * world_size for size in sizes[:-1])
    seen = sum(sizes)
    assert seen == num_samples + epoch.num_repeated_samples - epoch.num_dropped_samples


@given(
    num_samples=st.integers(1, 10**12),
    micro_batch=st.integers(1, 10**6),
    accumulate=st.integers(1, 10**6),
    world_size=st.integers(1, 10**4),
)
def test_no_row_is_lost(
    num_samples: int, micro_batch: int, accumulate: int, world_size: int
) -> None:
    epoch = EpochPlan.make(
        num_samples,
        micro_batch=micro_batch,
        accumulate=accumulate,
        world_size=world_size,
    )
    effective = micro_batch * accumulate * world_size
    assert 0 <= epoch.num_repeated_samples < world_size
    assert 0 < epoch.last_window_samples <= effective
    assert 0 < epoch.last_window_micro_batches <= accumulate
    assert (epoch.num_steps - 1) * effective + epoch.last_window_samples == (
        num_samples + epoch.num_repeated_samples
    )


def test_an_epoch_shorter_than_a_window_is_one_short_step() -> None:
    plan = BatchPlan.make(target=512, world_size=4, max_micro_batch=24)
    epoch = plan.epoch(100)
    assert (epoch.num_steps, epoch.last_window_samples) == (1, 100)
    assert (epoch.last_window_micro_batches, epoch.is_short) == (2, True)


def test_a_plans_epoch_equals_its_numbers() -> None:
    plan = BatchPlan.make(target=512, world_size=4, max_micro_batch=24)
    assert plan.epoch(50_001, drop_last=True) == EpochPlan.make(
        50_001, micro_batch=16, accumulate=8, world_size=4, drop_last=True
    )
    assert plan.epoch(51_200).is_short is False


def test_dropping_everything_is_refused() -> None:
    plan = BatchPlan.make(target=512, world_size=4, max_micro_batch=24)
    with pytest.raises(
        TrainkitError, match="drop_last: leaves nothing of 60 samples: a rank has 15"
    ):
        plan.epoch(60, drop_last=True)
    assert plan.epoch(61, drop_last=True).num_steps == 1


@pytest.mark.parametrize("value", [0, -1, 2.0, True, None, "100"])
def test_rows_that_are_no_number_are_refused(value: Any) -> None:
    plan = BatchPlan.make(target=8, max_micro_batch=8)
    with pytest.raises(TrainkitError, match="EpochPlan num_samples: must be a whole"):
        plan.epoch(value)


@pytest.mark.parametrize("name", ["micro_batch", "accumulate", "world_size"])
def test_sizes_that_are_no_number_are_refused(name: str) -> None:
    options: dict[str, Any] = {"micro_batch": 1, "accumulate": 1, "world_size": 1}
    options[name] = 0
    with pytest.raises(TrainkitError, match=f"EpochPlan {name}: must be a whole"):
        EpochPlan.make(8, **options)
