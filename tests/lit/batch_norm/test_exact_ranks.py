"""Exact BatchNorm over ranks with uneven windows is one batch on one rank."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from tests.helpers import raise_rank_errors, run_cases
from tests.lit.batch_norm.exact_fits import Images, apart, exact, fit, images
from trainkit import (
    AccumulationCallback,
    BatchNormGuard,
    MicroBatching,
    PerSample,
    TrainkitError,
)

SHARES: dict[int, list[tuple[int, ...]]] = {
    2: [(9, 3, 12), (3, 10, 1)],
    3: [(9, 3, 12), (3, 10, 1), (1, 1, 5)],
}
"""Rows in each rank's loader batches: micro-batches of 4 are 3 against 1, and so on."""

CUTS = {
    "split": MicroBatching(size=4),
    "whole": None,
}


def batches(shares: list[tuple[int, ...]], rank: int | None) -> DataLoader[Any]:
    """The loader batches of a rank; of all of them together, without a rank."""
    data, at, found = images(60), 0, []
    for step in zip(*shares, strict=True):
        rows = []
        for index, number in enumerate(step):
            if rank in (None, index):
                rows += range(at, at + number)
            at += number
        found.append(rows)
    return DataLoader(data, batch_sampler=found)


def fit_on_ranks(
    module: Images, callbacks: list[Any], rank: int, world_size: int
) -> None:
    fit(
        module,
        *callbacks,
        batches=batches(SHARES[world_size], rank),
        devices=world_size,
        strategy=DDPStrategy(process_group_backend="gloo"),
        use_distributed_sampler=False,
    )


def train(rank: int, world_size: int, cut: str, policy: Any) -> tuple[Any, int]:
    """The state after a training, and how often its layers communicated."""
    module, calls, own = Images(), list[Any](), dist.all_reduce
    callbacks = [AccumulationCallback(PerSample(), micro_batching=CUTS[cut])]

    def counted(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(tuple(tensor.shape))
        return own(tensor, *args, **kwargs)

    dist.all_reduce = counted
    try:
        guarded = [*callbacks, BatchNormGuard(policy)]
        fit_on_ranks(module, guarded, rank, world_size)
    finally:
        dist.all_reduce = own
    in_layers = [shape for shape in calls if shape in {(world_size, 13), (2, 6)}]
    return module.state_dict(), len(in_layers)


def refused(rank: int, world_size: int, callbacks: list[Any]) -> str:
    with pytest.raises(TrainkitError) as caught:
        fit_on_ranks(Images(), callbacks, rank, world_size)
    return str(caught.value)


@cache
def ranks_of(world_size: int) -> dict[str, list[Any]]:
    auto = exact(MicroBatching("auto"))
    cases: dict[str, Any] = {
        "split": (train, "split", "exact"),
        "whole": (train, "whole", "exact"),
        "control": (train, "split", "ignore"),
        "a rank whose memory runs out": (refused, auto),
        "on several ranks it needs the callback": (refused, [BatchNormGuard("exact")]),
    }
    if world_size > 2:
        cases = {"split": cases["split"]}
    found = run_cases(world_size, cases)
    return {name: raise_rank_errors(each) for name, each in found.items()}


@pytest.mark.parametrize(
    ("world_size", "name"), [(2, "split"), (2, "whole"), (2, "control"), (3, "split")]
)
def test_ranks_equal_one_batch(world_size: int, name: str) -> None:
    """Plain accumulation, the control, does not."""
    whole = Images()
    fit(whole, batches=batches(SHARES[world_size], None))
    for state, calls in ranks_of(world_size)[name]:
        module = Images()
        module.load_state_dict(state)
        if name == "control":
            assert apart(module, whole) > 0.1 * apart(whole, Images())
        else:
            assert apart(module, whole) <= 1e-10
            assert calls == 6 * 2 * 2  # steps x layers x (forward and backward)


@pytest.mark.parametrize(
    "words", ["a rank whose memory runs out", "on several ranks it needs the callback"]
)
def test_what_ranks_cannot_do_is_refused(words: str) -> None:
    assert all(words in said for said in ranks_of(2)[words])
