"""The proof at the beginning of a run: right verdicts, no trace, never in the way."""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from torch import nn

from tests.helpers import raise_rank_errors, run_ranks, trainer
from tests.lit.proof import zoo
from tests.lit.proof.starting import (
    ALARM,
    CLASSES,
    SPLIT,
    fit,
    images,
    said,
    tokens,
)
from tests.lit.proof.zoo import Attending, Images, Noisy, Positioned, Tokens, TwoTerms
from trainkit import (
    AccumulationCallback,
    AccumulationMixin,
    PerSample,
    PerToken,
    StepProgress,
    TrainkitError,
)


@pytest.mark.parametrize(
    ("module", "data", "strategy", "split"),
    [
        (lambda: Tokens(), tokens, PerToken(), None),
        (lambda: Tokens(), tokens, PerToken(), SPLIT),
        (lambda: Tokens(), lambda: tokens(4), PerToken(), None),
        (lambda: Tokens(), lambda: tokens(3), PerToken(), None),
        (lambda: Tokens(), lambda: tokens(2), PerToken(), None),
        (lambda: Tokens(zoo.shifted), tokens, PerToken(shift=True), None),
        (lambda: Tokens(zoo.row_mean), tokens, PerSample(), None),
        (
            lambda: Tokens(zoo.token_sum),
            tokens,
            PerToken(loss_reduction="total"),
            None,
        ),
        (lambda: Tokens(zoo.class_weighted), tokens, CLASSES, None),
        (lambda: Noisy(), tokens, PerToken(), None),
        (lambda: Attending(has_mask=True), tokens, PerToken(), SPLIT),
        (lambda: Positioned(), tokens, PerToken(), None),
        (lambda: Images(zoo.classified), images, PerSample(), None),
        (lambda: Images(zoo.sample_weighted), images, PerSample(mask=2), SPLIT),
        (
            lambda: TwoTerms(),
            tokens,
            {"tokens": PerToken(), "rows": PerSample()},
            SPLIT,
        ),
    ],
)
def test_what_is_exact_is_said_to_be(
    capsys: pytest.CaptureFixture[str],
    module: Any,
    data: Any,
    strategy: Any,
    split: Any,
) -> None:
    """The control: the wrong ones below."""
    fit(module(), data(), strategy, split)
    found = re.fullmatch(
        r"exact on \d of your rows(, padded alike)?: off by (\S+)( \(rounding \S+\))?",
        said(capsys),
    )
    assert found is not None
    assert float(found[2]) < 1e-5
    assert bool(found[1]) == (split is None and isinstance(module(), Tokens))


@pytest.mark.parametrize("split", [None, SPLIT])
@pytest.mark.parametrize(
    ("module", "data", "strategy", "cause"),
    [
        (lambda: Tokens(), tokens, PerSample(), "PerSample() counts"),
        (lambda: Tokens(zoo.shifted), tokens, PerToken(), "PerToken() counts"),
        (lambda: Tokens(zoo.masked), tokens, PerToken(), "PerToken() counts"),
        (lambda: Tokens(zoo.token_sum), tokens, PerToken(), "PerToken() counts"),
        (lambda: Tokens(zoo.class_weighted), tokens, PerToken(), "PerToken() counts"),
        (lambda: Images(zoo.sample_weighted), images, PerSample(), "PerSample()"),
        (
            lambda: Images(zoo.classified, nn.BatchNorm2d),
            images,
            PerSample(),
            "as BatchNorm does (net.1)",
        ),
        (lambda: Images(zoo.dice), images, PerSample(), "across the rows"),
        (lambda: Images(zoo.nt_xent), images, PerSample(), "across the rows"),
        (lambda: Images(zoo.vicreg), images, PerSample(), "across the rows"),
        (lambda: Tokens(zoo.focal_over_batch), tokens, PerToken(), "across the rows"),
        (lambda: Tokens(zoo.two_means), tokens, PerToken(), "across the rows"),
    ],
)
def test_what_is_not_exact_is_warned_of(
    capsys: pytest.CaptureFixture[str],
    module: Any,
    data: Any,
    strategy: Any,
    cause: str,
    split: Any,
) -> None:
    with pytest.warns(UserWarning, match=ALARM) as caught:
        fit(module(), data(), strategy, split)
    text = next(str(each.message) for each in caught if ALARM in str(each.message))
    assert cause in text
    assert "trainkit check" in text
    assert said(capsys) == ""


@pytest.mark.parametrize(
    "bar", [StepProgress, RichProgressBar, TQDMProgressBar, None], ids=str
)
def test_it_is_printed_above_every_bar(
    capsys: pytest.CaptureFixture[str], bar: Any
) -> None:
    bars = () if bar is None else (bar(),)
    shown = bar is not None
    fit(Tokens(), tokens(), PerToken(), callbacks=bars, enable_progress_bar=shown)
    assert re.search(r"trainkit \| proof: exact on 5", capsys.readouterr().out)


def test_required_proof_refuses_to_train() -> None:
    module = Tokens()
    before = module.head.weight.detach().clone()
    with pytest.raises(TrainkitError, match='proof="require": .*not the big batch'):
        fit(module, tokens(), PerSample(), proof="require")
    assert torch.equal(module.head.weight, before)
    with pytest.raises(TrainkitError, match='"require": not measured: a loader batch'):
        fit(module, tokens(1), PerToken(), proof="require")
    fit(module, tokens(), PerToken(), proof="require")
    assert not torch.equal(module.head.weight, before)


def test_a_window_of_one_batch_needs_no_proof(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fit(Tokens(), tokens(), PerSample(), accumulate=1, proof="require")
    fit(Tokens(), tokens(), PerSample(), proof="off")
    assert said(capsys) == ""


def test_the_mixin_has_the_option_too(capsys: pytest.CaptureFixture[str]) -> None:
    class Own(AccumulationMixin, Tokens):
        accumulation = PerSample()
        accumulation_proof: Any = "require"

    pl = trainer(4, max_epochs=1)
    with pytest.raises(TrainkitError, match="not the big batch"):
        pl.fit(Own(), tokens())
    module = Own()
    module.accumulation_proof = None
    module.accumulation = PerToken()
    pl = trainer(4, max_epochs=1)
    pl.fit(module, tokens())
    assert said(capsys).startswith("exact on 5 of your rows")


@pytest.mark.parametrize("wrong", ["on", True, None, "REQUIRE"])
def test_other_values_are_refused(wrong: Any) -> None:
    with pytest.raises(TrainkitError, match=r'proof: must be "warn", "require" or'):
        AccumulationCallback(PerToken(), proof=wrong)


class FussyOnOne(Tokens):
    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        if self.global_rank == 1 and len(batch["ids"]) < 8:
            raise ValueError("only here")
        return super().training_step(batch, batch_idx)


class WrongOnOne(Tokens):
    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss * len(batch["ids"]) if self.global_rank == 1 else loss


RANKS = {"strategy": "ddp", "devices": 2, "limit_train_batches": 2}


class Coupled(Tokens):
    """So little that float32 cannot tell it from rounding."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        across = self.features(batch)[:, 0].mean(0).square().sum()
        return super().training_step(batch, batch_idx) + 3e-5 * across


CASES = {
    "exact": (Tokens, PerToken(), 16, None),
    "split": (Tokens, PerToken(), 16, SPLIT),
    "inexact": (Tokens, PerSample(), 16, None),
    "wrong on one": (WrongOnOne, PerToken(), 16, None),
    "fussy on one": (FussyOnOne, PerToken(), 16, None),
    "few": (Tokens, PerToken(), 1, None),
    "coupled a little": (Coupled, PerToken(), 16, None),
}


def on_a_rank(rank: int, world_size: int) -> dict[str, tuple[str, list[str]]]:
    """What is printed and what is warned of, for each case."""
    found = {}
    for name, (module, strategy, size, split) in CASES.items():
        out = io.StringIO()
        with (
            contextlib.redirect_stdout(out),
            warnings.catch_warnings(record=True) as caught,
        ):
            warnings.simplefilter("always")
            fit(module(), tokens(size), strategy, split, accumulate=1, **RANKS)
        alarms = [str(w.message) for w in caught if ALARM in str(w.message)]
        lines = [ln for ln in out.getvalue().split("\n") if "proof:" in ln]
        found[name] = "; ".join(lines), alarms
    try:
        fit(WrongOnOne(), tokens(), PerToken(), proof="require", **RANKS)
    except TrainkitError as error:
        found["required"] = str(error), []
    return found


def test_all_ranks_measure_or_none() -> None:
    """With windows of one loader batch, each rank's share is a micro-batch."""
    first, second = raise_rank_errors(run_ranks(on_a_rank, 2))
    for name in ("exact", "split"):
        assert "exact on 5 of your rows" in first[name][0]
    for name in ("inexact", "wrong on one"):
        (alarm,) = first[name][1]
        assert "PerSample() counts" in alarm or "found on another rank" in alarm
        assert first[name][0] == ""
    (alarm,) = first["coupled a little"][1]
    assert "across the rows" in alarm or "found on another rank" in alarm
    assert "not measured: another rank" in first["fussy on one"][0]
    assert "not measured: a loader batch has 1 row" in first["few"][0]
    for name in CASES:
        assert second[name] == ("", [])
    assert "not the big batch" in first["required"][0]
    assert "not the big batch" in second["required"][0]
