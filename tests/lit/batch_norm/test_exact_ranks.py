"""Exact BatchNorm over ranks with uneven windows is one batch on one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from tests.helpers import raise_rank_errors, run_ranks
from tests.lit.batch_norm.exact_fits import Images, apart, exact, fit, images
from trainkit import AccumulationCallback, BatchNormGuard, MicroBatching, PerSample

SHARES: dict[int, list[tuple[int, ...]]] = {
    2: [(9, 3, 12), (3, 10, 1)],
    3: [(9, 3, 12), (3, 10, 1), (1, 1, 5)],
}
"""Rows in each rank's loader batches: micro-batches of 4 are 3 against 1, and so on."""

CUTS = {
    "split": MicroBatching(size=4),
    "inside": MicroBatching(inside="net", size=4),
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


def train_on_rank(rank: int, world_size: int, cut: str, policy: str) -> Any:
    module = Images()
    callbacks: list[Any] = exact(CUTS[cut])  # type: ignore[arg-type]
    if policy != "exact":
        callbacks[1] = BatchNormGuard("ignore")
    calls: list[Any] = []
    own = dist.all_reduce

    def counted(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(tensor.shape)
        return own(tensor, *args, **kwargs)

    dist.all_reduce = counted
    try:
        fit(
            module,
            *callbacks,
            batches=batches(SHARES[world_size], rank),
            devices=world_size,
            strategy=DDPStrategy(process_group_backend="gloo"),
            use_distributed_sampler=False,
        )
    finally:
        dist.all_reduce = own
    in_layers = [shape for shape in calls if tuple(shape) in {(world_size, 13), (2, 6)}]
    return module.state_dict(), len(in_layers)


def whole_batches(world_size: int) -> Images:
    module = Images()
    fit(module, batches=batches(SHARES[world_size], None))
    return module


def trained(world_size: int, *how: Any) -> list[tuple[Images, int]]:
    """The module of each rank, and how often its layers communicated."""
    found = []
    ranks = run_ranks(train_on_rank, world_size, *how)
    for state, calls in raise_rank_errors(ranks):
        module = Images()
        module.load_state_dict(state)
        found.append((module, calls))
    return found


@pytest.mark.parametrize(
    ("world_size", "cut"),
    [(2, "split"), (2, "inside"), (2, "whole"), (3, "split")],
)
def test_ranks_equal_one_batch(world_size: int, cut: str) -> None:
    whole = whole_batches(world_size)
    for module, calls in trained(world_size, cut, "exact"):
        assert apart(module, whole) <= 1e-10
        assert calls == 12 * 2 * 2  # steps x layers x (forward and backward)


def test_plain_accumulation_on_ranks_does_not() -> None:
    module, _ = trained(2, "split", "ignore")[0]
    whole = whole_batches(2)
    assert apart(module, whole) > 0.1 * apart(whole, Images())


def refused_on_rank(rank: int, world_size: int) -> str:
    with pytest.raises(Exception, match="a rank whose memory runs out") as caught:
        fit(
            Images(),
            *exact(MicroBatching("auto")),
            batches=batches(SHARES[2], rank),
            devices=world_size,
            strategy=DDPStrategy(process_group_backend="gloo"),
            use_distributed_sampler=False,
        )
    return str(caught.value)


def test_sizes_cannot_be_searched_between_ranks() -> None:
    raise_rank_errors(run_ranks(refused_on_rank, 2))


def without_callback(rank: int, world_size: int) -> str:
    with pytest.raises(Exception, match="on several ranks it needs the callback"):
        fit(
            Images(),
            BatchNormGuard("exact"),
            batches=batches(SHARES[2], rank),
            devices=world_size,
            strategy=DDPStrategy(process_group_backend="gloo"),
            use_distributed_sampler=False,
        )
    return ""


def test_ranks_without_the_callback_are_refused() -> None:
    raise_rank_errors(run_ranks(without_callback, 2))


def test_one_rank_with_one_batch_a_window_needs_nothing() -> None:
    trained_ = []
    for callbacks in ([], [AccumulationCallback(PerSample()), BatchNormGuard("exact")]):
        trained_.append(Images())
        fit(trained_[-1], *callbacks)
    assert apart(*trained_) <= 1e-14
