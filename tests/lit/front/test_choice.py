"""What a mixin module says a micro-batch weighs: nothing, late, or something else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.helpers import (
    deviation,
    loader,
    pad,
    ragged_sequences,
    trainer,
    weights,
)
from tests.zoo.modules import (
    Manual,
    Mixed,
    OldMixed,
    Plain,
    hooked,
    old_trainer,
)
from trainkit import AccumulationStrategy, MicroBatching, PerSample, PerToken, Uniform
from trainkit.errors import TrainkitError

pytestmark = pytest.mark.filterwarnings("ignore:accumulation. an open window")
EXACT = 1e-10
DATA = ragged_sequences(40)
WINDOW = 16
NO_STRATEGY = r"accumulation: a module with AccumulationMixin must say.*PerSample\(\)"
START = weights(Plain())


def fitted(module: Any, accumulate: int = 4, batch: int = 4, **options: Any) -> Any:
    trainer(accumulate, **options).fit(module, loader(DATA, batch))
    return module


def too_late(self: Any, batch: Any, batch_idx: int) -> None:
    raise AssertionError("too late")


# ---- nothing -------------------------------------------------------------------------


SILENT = hooked(Mixed, accumulation=None)
LOGS = hooked(
    SILENT, validation_step=lambda self, b, i: self.log("val", self.loss_of(b))
)
LOGS_EXACTLY = hooked(
    SILENT, validation_step=lambda self, b, i: self.log_exact("val", self.loss_of(b), b)
)


def turns_silent(self: Any) -> None:
    self.accumulation = None if self.current_epoch else PerToken()


@pytest.mark.parametrize(
    "fit",
    [
        lambda: fitted(SILENT(), 1),
        # Before the sanity check.
        lambda: trainer(4).fit(
            hooked(SILENT, validation_step=too_late)(), loader(DATA, 4), loader(DATA, 4)
        ),
        lambda: old_trainer().fit(
            hooked(OldMixed, accumulation=None)(), loader(DATA, 4)
        ),
        lambda: fitted(hooked(Manual, accumulation=None)()),
        lambda: fitted(SILENT(cut=MicroBatching(size=2))),
        lambda: fitted(hooked(Mixed, on_train_epoch_start=turns_silent)()),
        lambda: trainer().validate(LOGS_EXACTLY(), loader(DATA, 4), verbose=False),
    ],
)
def test_module_without_a_strategy_is_refused(fit: Callable[[], Any]) -> None:
    """As `Uniform()`, the default of before, it was 35 % off on ragged data."""
    with pytest.raises(TrainkitError, match=NO_STRATEGY) as refused:
        fit()
    for name in ("PerToken()", "Uniform()", ".accumulation", "--accumulation="):
        assert name in str(refused.value)


def test_without_fit_nothing_is_asked() -> None:
    results = trainer().validate(LOGS(), loader(DATA, 4), verbose=False)
    assert "val" in results[0]


# ---- Uniform() by name ---------------------------------------------------------------


def test_uniform_says_when_it_is_right(capsys: Any) -> None:
    """And is never called exact; other strategies say nothing of it."""
    fitted(Mixed(strategy=Uniform()), 4, 3)
    said = capsys.readouterr().out
    assert "exact" not in said
    assert "every micro-batch has weight 1" in said
    fitted(Mixed())
    said = capsys.readouterr().out
    assert "alike" not in said
    assert "weight 1" not in said


# ---- another one in mid-training -----------------------------------------------------


@dataclass
class ByLabel(AccumulationStrategy):
    """Two of them cannot be compared by ==, but for their very tensors."""

    weights: torch.Tensor

    def weight(self, batch: Any) -> torch.Tensor:
        labels = batch["labels"]
        return self.weights[labels[labels != -100]].sum()


RATES = [torch.linspace(0.5, last, 13, dtype=torch.float64) for last in (2, 7)]


class MadeAnew(Mixed):
    """Makes a strategy whenever it is asked for one, of weights that may turn."""

    turns = False

    @property
    def accumulation(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        has_turned = self.turns and self._trainer and self.current_epoch
        return ByLabel(RATES[bool(has_turned)])

    def loss_of(self, batch: Any) -> torch.Tensor:
        logits, labels = self.net(batch["ids"]).flatten(0, 1), batch["labels"].flatten()
        return cross_entropy(logits, labels, weight=RATES[0])


def test_strategy_that_holds_tensors_may_be_made_anew() -> None:
    """Made of the same weights it is the same."""
    module, big = MadeAnew(), MadeAnew()
    fitted(module)
    optimizer: Any = big.configure_optimizers()
    for start in [*range(0, len(DATA), WINDOW)] * 2:
        optimizer.zero_grad()
        big.loss_of(pad(DATA[start : start + WINDOW])).backward()
        optimizer.step()
    assert deviation(module, big, START) <= EXACT


class ByName(Uniform):
    """Compares by its own ==."""

    def __init__(self) -> None:
        object.__setattr__(self, "made", object())

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    __hash__ = object.__hash__


def test_strategy_that_compares_by_itself_may_be_made_anew() -> None:
    fitted(hooked(Mixed, accumulation=property(lambda self: ByName()))())


def assigns(name: str, value: Any) -> Any:
    def assign(self: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 4:
            setattr(self, name, value)

    return {"on_train_batch_start": assign}


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (hooked(Mixed, **assigns("accumulation", PerSample())), "Mixed.accumulation:"),
        (hooked(Manual, **assigns("accumulation", Uniform())), "Manual.accumulation:"),
        (hooked(MadeAnew, turns=True), "MadeAnew.accumulation: it was"),
        (
            hooked(Mixed, **assigns("micro_batching", MicroBatching(size=1))),
            "Mixed.micro_batching: it was None when training began",
        ),
    ],
)
def test_what_is_assigned_in_a_fit_is_refused(kind: Any, text: str) -> None:
    with pytest.raises(TrainkitError, match=f"(?s){text}.*It cannot change during"):
        fitted(kind())
