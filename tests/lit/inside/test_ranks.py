"""On several ranks, a fit with an inner cut equals the fit without it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from tests.core.inside.common import batch, nt_xent
from tests.helpers import NAIVE, deviation, raise_rank_errors, run_ranks, weights
from tests.lit.inside.common import Foreign, Own, fit
from trainkit import AccumulationCallback, MicroBatching, PerSample

EXACT = 1e-12


def mean(out: Tensor, labels: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(out, labels)


def train(rank: int, world: int, kind: str, options: Any, loss: Any) -> Any:
    """Two epochs on this rank's share."""
    module = (Own if kind == "mixin" else Foreign)(loss, calls=2)
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


@pytest.mark.parametrize(
    "kind", ["callback", "mixin", "ddp_find_unused_parameters_true"]
)
def test_ranks_with_an_inner_cut_equal_ranks_without(kind: str) -> None:
    options = MicroBatching(size=3, inside="net")
    cut = raise_rank_errors(run_ranks(train, 2, kind, options, nt_xent))
    plain = raise_rank_errors(run_ranks(train, 2, "plain", None, nt_xent))
    start = cut[0][0]
    assert torch.equal(cut[0][1], cut[1][1])
    assert deviation(cut[0][1], plain[0][1], start) <= EXACT


def test_a_mean_over_rows_equals_one_process_with_the_big_batch() -> None:
    options = MicroBatching(size=3, inside="net")
    ranks = raise_rank_errors(run_ranks(train, 2, "callback", options, mean))
    module = Foreign(mean, calls=2)
    naive = copy.deepcopy(module)
    x, labels = batch(44)
    order = [n for half in (range(22), range(22, 44)) for n in half]
    loader = DataLoader(TensorDataset(x[order], labels[order]), 22)
    fit(module, None, loader=loader)
    fit(naive, None, loader=DataLoader(TensorDataset(x, labels), 11))
    start, trained = ranks[0]
    assert deviation(trained, weights(module), start) <= EXACT
    assert deviation(weights(naive), weights(module), start) > NAIVE
