"""A batch that no loader tells is given, or refused before the first step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.helpers import ragged_sequences, raise_rank_errors, run_ranks, trainer
from tests.lit.rates.scaled import (
    EXACT,
    Scheduled,
    data,
    deviation,
    fit,
    linear,
    plain,
    times,
)
from trainkit import AccumulationCallback, PerToken, TokenBudgetSampler, Uniform
from trainkit.errors import TrainkitError


class Tokens(Scheduled):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch["labels"].double().clamp(min=0), batch_idx)


def tokens(counts: list[int]) -> Any:
    """Batches of one row with so many valid labels."""
    rows = [torch.arange(40).where(torch.arange(40) < n, -100) for n in counts]
    return DataLoader([{"labels": row} for row in rows], batch_size=1)  # type: ignore[arg-type]


COUNTS = [3, 9, 20, 5, 7, 7, 40, 1, 2, 2, 13, 17, 5, 5, 11, 3, 40, 40, 40, 40]
READY: Any = [torch.ones(5, 1, dtype=torch.float64)] * 20
ROWS: Any = [torch.ones(1, dtype=torch.float64)] * 24
BUDGET = TokenBudgetSampler([len(ids) for ids, _ in ragged_sequences(24)], tokens=40)
UNKNOWN: dict[str, Any] = {
    "ready batches": DataLoader(READY, batch_size=None),
    "a budget of tokens": DataLoader(ROWS, batch_sampler=BUDGET),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_samples_that_no_loader_tells_must_be_given(name: str) -> None:
    ours, module = AccumulationCallback(Uniform()), Scheduled(None)
    how: dict[str, Any] = {"loader": UNKNOWN[name], "max_epochs": 1}
    match = "must say how many samples .* since the training loader has no batch size"
    with pytest.raises(TrainkitError, match=f"LRScaling micro_batch: {match}"):
        fit(module, ours, linear(), **how)
    assert module.curve == []
    given = fit(module, ours, linear(micro_batch=3), **how).curve
    steps = len(given)
    assert deviation(given, times(plain(None, steps), [4.0] * steps)) <= EXACT


@pytest.mark.parametrize("strategy", [PerToken(), Uniform(), None])
def test_tokens_must_be_given(strategy: Any) -> None:
    """Whatever weighs them, also without windows."""
    ours, module = [] if strategy is None else [AccumulationCallback(strategy)], Tokens
    how: dict[str, Any] = {"loader": tokens(COUNTS), "max_epochs": 1}
    scaling = linear(unit="tokens", reference_batch=10)
    with pytest.raises(TrainkitError, match="many tokens .* since no loader knows it"):
        fit(module(None), *ours, scaling, **how)
    scaling = linear(unit="tokens", reference_batch=10, micro_batch=30)
    curve = fit(module(None), *ours, scaling, **how).curve
    assert deviation(curve, times(plain(None, 10), [6.0] * 10)) <= EXACT
    assert scaling.k == 6.0


def test_a_loader_that_tells_nothing_later_is_refused_then() -> None:
    """`reload_dataloaders_every_n_epochs` may bring another one."""

    class Reloads(Scheduled):
        def train_dataloader(self) -> Any:
            return data() if self.current_epoch == 0 else UNKNOWN["ready batches"]

    module = Reloads(None)
    how: dict[str, Any] = {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 2}
    with pytest.raises(TrainkitError, match="LRScaling micro_batch: must say how many"):
        trainer(2, callbacks=[linear()], **how).fit(module)
    assert len(module.curve) > 0


# ---- several ranks -------------------------------------------------------------------


def train_both(rank: int, world: int) -> dict[str, Any]:
    how: dict[str, Any] = {"strategy": "ddp", "devices": world, "max_epochs": 1}
    how["use_distributed_sampler"] = False
    name = "OneCycleLR-cos"
    samples = fit(Scheduled(name), linear(), loader=data(), **how)
    given = linear(unit="tokens", reference_batch=10, micro_batch=15)
    ours = [AccumulationCallback(PerToken()), given]
    of_rank = fit(Tokens(name), *ours, loader=tokens(COUNTS[rank::world]), **how)
    return {"samples": samples.curve, "tokens": of_rank.curve}


def test_two_ranks_give_twice_the_factor() -> None:
    both = raise_rank_errors(run_ranks(train_both, 2))
    assert both[0] == both[1]
    for kind, k in {"samples": 8.0, "tokens": 6.0}.items():
        expected = times(plain("OneCycleLR-cos", 5), [k] * 5)
        assert deviation(both[0][kind], expected) <= EXACT
