"""What the inner cut refuses in a fit, and what it says of the remedy."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from tests.core.inside.common import batch
from tests.lit.inside.common import Foreign, Own, fit
from trainkit import AccumulationCallback, MicroBatching, TrainkitError, check


class Logging(Foreign):
    """Logs in its own forward."""

    def __init__(self, log: str = "log") -> None:
        super().__init__()
        self.how = log

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if self.how == "log":
            self.log("norm", out.norm())
        elif self.how == "log_dict":
            self.log_dict({"norm": out.norm()})
        return out


@pytest.mark.parametrize("proof", ["warn", "off", "require"])
@pytest.mark.parametrize("how", ["log", "log_dict"])
def test_logging_within_a_cut_is_refused(proof: Any, how: str) -> None:
    options = MicroBatching(size=4, inside="self")
    callback = AccumulationCallback(micro_batching=options, proof=proof)
    words = f"self.{how} within self, which runs in chunks .* log it in training_step"
    module = Logging(how)
    with pytest.raises(TrainkitError, match=words):
        fit(module, None, callback)
    assert "log" not in vars(module)


def test_logging_outside_of_a_cut_is_not() -> None:
    run = fit(Logging(), MicroBatching(size=4, inside="net"))
    assert {"norm", "loss"} <= set(run.callback_metrics)
    run = fit(Logging("none"), MicroBatching(size=4, inside="self"))
    assert "loss" in run.callback_metrics


def test_auto_goes_around_what_logs(capsys: pytest.CaptureFixture[str]) -> None:
    fit(Logging(), MicroBatching(size=4, inside="auto"))
    assert 'found by inside="auto": net\n' in capsys.readouterr().out


def test_check_refuses_logging_as_well() -> None:
    options = MicroBatching(size=4, inside="self")
    with pytest.raises(TrainkitError, match="self.log within self"):
        check(Logging(), batch(), micro_batches=options)


@pytest.mark.parametrize("has_mixin", [False, True])
def test_no_strategy_is_refused_with_the_inner_cut_as_a_way(has_mixin: bool) -> None:
    words = r"received None\. .*PerSample\(\) .*compares rows .*size=8, inside='net'"
    with pytest.raises(TrainkitError, match=words):
        fit(
            Own() if has_mixin else Foreign(),
            None,
            *[AccumulationCallback()][has_mixin:],
        )
    how = MicroBatching(size=8, inside="net")
    fit(Own() if has_mixin else Foreign(), how)


def test_why_the_proof_is_not_measured_is_a_sentence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Odd(Foreign):
        """Refuses few rows, at length."""

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if len(batch[0]) < 8:
                raise ValueError(f"{'few rows ' * 40}. And more.")
            return super().training_step(batch, batch_idx)

    fit(Odd(), MicroBatching(size=4, inside="net"))
    line = next(x for x in capsys.readouterr().out.splitlines() if "not meas" in x)
    assert line.endswith(("few rows ...", "few ...")), line
    assert len(line) < 300
