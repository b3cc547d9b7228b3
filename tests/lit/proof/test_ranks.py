"""Two ranks: one verdict, and an error of one rank on both."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

import trainkit
from tests.helpers import raise_rank_errors, run_ranks, trainer
from tests.lit.proof.test_check import SPLIT
from tests.zoo import causes
from tests.zoo.causes import NormalisedTokens, Tokens
from tests.zoo.wrongs import ClipsEarly
from trainkit import PerSample, PerToken


class FailsOnOne(Tokens):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_rank == 1:
            raise RuntimeError("only here")
        return super().training_step(batch, batch_idx)


class UnlikeOnOne(Tokens):
    """One rank trains another loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.loss = (
            causes.row_mean if self.trainer.global_rank == 1 else causes.token_mean
        )
        return super().training_step(batch, batch_idx)


class Exchanges(UnlikeOnOne):
    """It sums over ranks by itself, and one of them rehearses more often."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        ranks = torch.ones(())
        torch.distributed.all_reduce(ranks)
        return super().training_step(batch, batch_idx) * ranks


class Gathers(Tokens):
    def features(self, batch: Any) -> Any:
        everywhere: Any = self.all_gather(super().features(batch))
        return everywhere


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "exact": (Tokens, {}),
    "exact, split": (Tokens, {"micro_batches": SPLIT}),
    "another strategy": (Tokens, {"strategy": PerSample()}),
    "BatchNorm, split": (NormalisedTokens, {"micro_batches": SPLIT}),
    "a hook": (ClipsEarly, {}),
    "unlike on one rank": (UnlikeOnOne, {}),
    "exchanges": (Exchanges, {}),
    "an error on one rank": (FailsOnOne, {}),
    "gathers": (Gathers, {}),
}


def _checked(rank: int, world_size: int) -> dict[str, Any]:
    torch.manual_seed(0)
    found: dict[str, Any] = {}
    for name, (module, options) in CASES.items():
        made = module()
        data = DataLoader(
            causes.sequences(),  # type: ignore[arg-type]
            batch_size=4,
            collate_fn=causes.padded,
        )
        ddp = trainer(strategy="ddp", devices=world_size)
        try:
            report = trainkit.check(
                made, data, trainer=ddp, **{"strategy": PerToken(), **options}
            )
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
        else:
            found[name] = report.exact, [c.kind for c in report.causes], str(report)
    return found


def test_both_ranks_say_what_one_has_found() -> None:
    one, other = raise_rank_errors(run_ranks(_checked, 2))
    assert one["exact"][:2] == (True, [])
    assert one["exact, split"][:2] == (True, [])
    assert one["another strategy"][:2] == (False, ["denominator"])
    assert one["BatchNorm, split"][:2] == (False, ["rows"])
    assert one["a hook"][:2] == (False, ["order"])
    assert one["unlike on one rank"][:2] == (False, ["denominator"])
    assert "these are rank 1's" in one["unlike on one rank"][2]
    assert one["exchanges"][:2] == (False, ["denominator"])
    reports = [name for name in one if isinstance(one[name], tuple)]
    assert [one[name] for name in reports] == [other[name] for name in reports]
    assert other["an error on one rank"].startswith("RuntimeError: only here")
    assert "rank 1 failed: " in one["an error on one rank"]
    assert "only here" in one["an error on one rank"]
    # Each rank rehearses alone, so nothing waits.
    assert one["gathers"][:2] == (True, [])
