"""Half precision: the verdict is on exact arithmetic, and what is lost is shown."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor

from tests.lit.proof.starting import plain_trainer
from tests.lit.proof.test_check import check_quickly as check
from tests.zoo.causes import NormalisedTokens, Tokens, token_loader
from trainkit import PerSample, PerToken
from trainkit.lit.proof import rehearse

PRECISIONS = ["bf16-mixed", "bf16-true", "16-true"]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_rounding_alone_is_not_called_inexact(precision: str) -> None:
    trainer = plain_trainer(precision=precision)
    report = check(Tokens(), token_loader(), strategy=PerToken(), trainer=trainer)
    report.assert_exact()
    assert report.deviation < 1e-12
    assert f"left out: precision {precision}" in str(report)


def test_a_gradient_scaler_is_as_before() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(torch.ones(()))
    before = scaler.state_dict()
    trainer = plain_trainer(plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    report = check(Tokens(), token_loader(), strategy=PerToken(), trainer=trainer)
    assert report.exact
    assert scaler.state_dict() == before


@pytest.mark.parametrize("precision", PRECISIONS)
def test_half_precision_hides_no_cause(precision: str) -> None:
    trainer = plain_trainer(precision=precision)
    report = check(Tokens(), token_loader(), strategy=PerSample(), trainer=trainer)
    (cause,) = report.causes
    assert cause.remedy == ("accumulation = PerToken()",)
    trainer = plain_trainer(precision=precision)
    report = check(
        NormalisedTokens(), token_loader(), strategy=PerToken(), trainer=trainer
    )
    (cause,) = report.causes
    assert cause.place == "norm"


class OnlyIn(Tokens):
    """Has an operation that knows one dtype."""

    def __init__(self, dtype: torch.dtype, loss: Any = None) -> None:
        super().__init__(loss)
        self.only = dtype

    def features(self, batch: dict[str, Any]) -> Tensor:
        hidden = super().features(batch)
        if hidden.dtype is not self.only:
            raise RuntimeError(f"this kernel knows {self.only} only")
        return hidden


def test_what_runs_in_half_precision_only_is_never_called_exact() -> None:
    trainer = plain_trainer(precision="bf16-true")
    module = OnlyIn(torch.bfloat16)
    report = check(module, token_loader(), strategy=PerToken(), trainer=trainer)
    assert not report.exact
    (cause,) = report.causes
    assert cause.kind == "precision"
    assert "cannot say on 10 rows" in str(report)


def test_what_knows_no_float64_is_measured_in_float32() -> None:
    trainer = plain_trainer(precision="bf16-mixed")
    module = OnlyIn(torch.float32)
    report = check(module, token_loader(), strategy=PerToken(), trainer=trainer)
    assert report.exact
    assert report.precision == "float32"
    assert 1e-9 < report.deviation < 1e-5
    module = OnlyIn(torch.float32)
    assert not check(module, token_loader(), strategy=PerSample()).exact


class Casts(Tokens):
    """Names the type of its features."""

    def __init__(self, cast: Any) -> None:
        super().__init__()
        self.cast = cast

    def features(self, batch: dict[str, Any]) -> Tensor:
        return self.cast(super().features(batch))


@pytest.mark.parametrize(
    "cast",
    [
        Tensor.float,
        lambda x: x.type(torch.float32),
        lambda x: x.to("cpu", torch.float32),
        lambda x: x.to(device="cpu", dtype=torch.float32),
    ],
)
def test_a_step_that_names_float32_is_measured_in_float64(cast: Any) -> None:
    report = check(Casts(cast), token_loader(), strategy=PerToken())
    assert (report.exact, report.precision) == (True, "float64")


def test_a_copy_in_float64_takes_at_most_a_gibibyte(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert 8 * rehearse.MOST_WIDE == 2**30
    monkeypatch.setattr(rehearse, "MOST_WIDE", 100)
    report = check(Tokens(), token_loader(), strategy=PerToken())
    assert (report.exact, report.precision) == (True, "float32")
