"""On several ranks, a fit with an inner cut equals the fit without it."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from tests.core.inside.common import batch, nt_xent
from tests.helpers import NAIVE, deviation, raise_rank_errors, run_cases, weights
from tests.lit.inside.common import Foreign, Own, fit
from trainkit import AccumulationCallback, MicroBatching, PerSample

EXACT = 1e-12


def mean(out: Tensor, labels: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(out, labels)


def train(rank: int, world: int, kind: str, options: Any, loss: Any) -> Any:
    """Two epochs on this rank's share."""
    kinds = {"mixin": Own, "gathers": Gathering}
    module = kinds.get(kind, Foreign)(loss, calls=2)
    start = weights(module)
    x, labels = batch(44)
    share = DataLoader(TensorDataset(x[rank::world], labels[rank::world]), 11)
    how = {"strategy": kind if "ddp" in kind else "ddp", "devices": world}
    how |= {"use_distributed_sampler": False}
    if options is not None and loss is mean:
        callback = AccumulationCallback(PerSample(), micro_batching=options)
        fit(module, None, callback, loader=share, **how)
    else:
        fit(module, options, loader=share, **how)
    return start, weights(module)


class Gathering(Foreign):
    """Compares with the rows of other ranks; its cut is looked for on each alone."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out: Any = self.all_gather(self(batch[0]), sync_grads=True)
        return nt_xent(out.flatten(0, 1), batch[1])


@cache
def ranks() -> dict[str, list[Any]]:
    """What two ranks give in each case."""
    options = MicroBatching(size=3, inside="net")
    unused = "ddp_find_unused_parameters_true"
    found = run_cases(
        2,
        {
            "plain": (train, "plain", None, nt_xent),
            "gathers": (
                train,
                "gathers",
                MicroBatching(size=4, inside="auto"),
                nt_xent,
            ),
            "mean": (train, "callback", options, mean),
            **{n: (train, n, options, nt_xent) for n in ("callback", "mixin", unused)},
        },
    )
    return {name: raise_rank_errors(each) for name, each in found.items()}


@pytest.mark.parametrize(
    "kind", ["callback", "mixin", "ddp_find_unused_parameters_true"]
)
def test_ranks_with_an_inner_cut_equal_ranks_without(kind: str) -> None:
    (start, first), (_, second) = ranks()[kind]
    assert torch.equal(first, second)
    assert deviation(first, ranks()["plain"][0][1], start) <= EXACT


def test_a_step_that_gathers_is_looked_at_on_each_rank_alone() -> None:
    for start, trained in ranks()["gathers"]:
        assert not torch.equal(start, trained)


def test_a_mean_over_rows_equals_one_process_with_the_big_batch() -> None:
    module = Foreign(mean, calls=2)
    naive = copy.deepcopy(module)
    x, labels = batch(44)
    order = [n for half in (range(22), range(22, 44)) for n in half]
    loader = DataLoader(TensorDataset(x[order], labels[order]), 22)
    fit(module, None, loader=loader)
    fit(naive, None, loader=DataLoader(TensorDataset(x, labels), 11))
    start, trained = ranks()["mean"][0]
    assert deviation(trained, weights(module), start) <= EXACT
    assert deviation(weights(naive), weights(module), start) > NAIVE
