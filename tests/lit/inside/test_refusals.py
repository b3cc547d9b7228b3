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


@pytest.mark.parametrize(
    ("proof", "how"), [("warn", "log"), ("off", "log_dict"), ("require", "log")]
)
def test_logging_within_a_cut_is_refused(proof: Any, how: str) -> None:
    options = MicroBatching(size=4, inside="self")
    callback = AccumulationCallback(micro_batching=options, proof=proof)
    words = f"self.{how} within self, which runs in chunks .* log it in training_step"
    module = Logging(how)
    with pytest.raises(TrainkitError, match=words):
        fit(module, None, callback)
    assert "log" not in vars(module)
    with pytest.raises(TrainkitError, match=words):
        check(module, batch(), micro_batches=options)


def test_logging_outside_of_a_cut_is_not() -> None:
    run = fit(Logging(), MicroBatching(size=4, inside="net"))
    assert {"norm", "loss"} <= set(run.callback_metrics)
    run = fit(Logging("none"), MicroBatching(size=4, inside="self"))
    assert "loss" in run.callback_metrics


def test_auto_goes_around_what_logs(capsys: pytest.CaptureFixture[str]) -> None:
    fit(Logging(), MicroBatching(size=4, inside="auto"))
    assert 'found by inside="auto": net\n' in capsys.readouterr().out


@pytest.mark.parametrize("kind", [Foreign, Own])
def test_windows_of_several_batches_need_a_strategy(kind: Any) -> None:
    with pytest.raises(TrainkitError, match="needs no strategy where one loader"):
        fit(kind(), MicroBatching(size=4, inside="net"), accumulate=2)


def test_a_path_that_leads_nowhere_is_refused_with_what_there_is() -> None:
    with pytest.raises(TrainkitError, match="'encoder'. It has net"):
        fit(Foreign(), MicroBatching(size=4, inside="encoder"))


@pytest.mark.parametrize("has_mixin", [False, True])
def test_no_strategy_is_refused_with_the_inner_cut_as_a_way(has_mixin: bool) -> None:
    words = r"received None\. .*PerSample\(\) .*compares rows .*size=8, inside='net'"
    module = Own() if has_mixin else Foreign()
    with pytest.raises(TrainkitError, match=words):
        fit(module, None, *[AccumulationCallback()][has_mixin:])
    fit(module, MicroBatching(size=8, inside="net"))


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
