"""Unusual optimizers: exact, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from tests.helpers import deviation, ragged_sequences, trainer, weights
from tests.lit.fronts import (
    RAGGED,
    WINDOW,
    Mixed,
    Plain,
    big_batch,
    merged,
    micro_batches,
    windows_of,
)
from tests.lit.windows.half import precise
from trainkit.errors import TrainkitError

SEQUENCES = ragged_sequences(38)
START = weights(Plain())
OPEN = "ignore:accumulation. an open window:UserWarning"


class WithLBFGS(Mixed):
    """Its closure runs several times in a step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4)


def test_lbfgs_in_windows_of_one_equals_plain_lightning() -> None:
    module, reference = WithLBFGS(), PlainLBFGS()
    for each in (module, reference):
        trainer(1, max_epochs=1).fit(each, micro_batches(SEQUENCES))
    assert deviation(module, reference, START) <= 1e-10


class PlainLBFGS(Plain):
    configure_optimizers = WithLBFGS.configure_optimizers


@pytest.mark.parametrize("scheduled", [True, False])
def test_lbfgs_in_windows_of_several_is_refused(scheduled: bool) -> None:
    """Before training, or before the epoch for which a scheduler lengthens windows."""
    scheduler = GradientAccumulationScheduler({0: 1, 1: 2})
    callbacks = [scheduler] if scheduled else []
    fitted = trainer(1 if scheduled else 2, callbacks=callbacks)
    text = "^LBFGS: .* exactly one. accumulate_grad_batches is 2. Set it to 1"
    with pytest.raises(TrainkitError, match=text):
        fitted.fit(WithLBFGS(), micro_batches(SEQUENCES))
    assert fitted.current_epoch == int(scheduled)


class Twice(torch.optim.SGD):
    """Looks at its closure again, as line searches do."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        assert closure is not None
        closure()
        return super().step(closure)


class WithTwice(Mixed):
    def configure_optimizers(self) -> Any:
        return Twice(self.parameters(), lr=0.5)


@pytest.mark.filterwarnings(OPEN)
def test_closure_run_twice_in_windows_of_several_is_refused() -> None:
    with pytest.raises(TrainkitError, match="it ran its closure twice in one step"):
        trainer(2).fit(WithTwice(), micro_batches(SEQUENCES))


def test_closure_run_twice_in_windows_of_one_equals_once() -> None:
    module, reference = WithTwice(), Mixed()
    for each in (module, reference):
        trainer(1).fit(each, micro_batches(SEQUENCES))
    assert deviation(module, reference, START) <= 1e-12


class Bypassing(Mixed):
    """Steps with the torch optimizer itself, past Lightning's hooks."""

    with_closure = False

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        if self.with_closure:
            optimizer.optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()
            optimizer.optimizer.step()


class BypassingWithClosure(Bypassing):
    with_closure = True


@pytest.mark.filterwarnings(OPEN)
@pytest.mark.parametrize("made", [Bypassing, BypassingWithClosure])
def test_step_that_bypasses_lightning_is_refused(made: type[Bypassing]) -> None:
    module = made()
    text = r"SGD.step\(\): its window of 4 micro-batches has not been divided"
    fitted = trainer(WINDOW)
    with pytest.raises(TrainkitError, match=text):
        fitted.fit(module, micro_batches(SEQUENCES))
    if not module.with_closure:
        assert torch.equal(weights(module), START)  # refused before it


class WithHook(Mixed):
    """Overrides the step as documented, for warm-up."""

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * (self.trainer.global_step + 1)
        optimizer.step(closure=optimizer_closure)


def test_overridden_optimizer_step_equals_big_batch() -> None:
    """ultralytics warms up in such a hook."""
    exact = WithHook()
    trainer(WINDOW).fit(exact, micro_batches(SEQUENCES))
    reference = WithHook()
    trainer().fit(reference, micro_batches(SEQUENCES, merged(RAGGED)))
    assert deviation(exact, reference, START) <= 1e-10


class LooksLikeOne:
    """Has what Lightning asks of an optimizer, and nothing else."""

    def __init__(self, parameters: Any) -> None:
        self.inner = torch.optim.SGD(parameters, lr=0.5)
        self.param_groups = self.inner.param_groups
        self.defaults = self.inner.defaults
        self.state = self.inner.state

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> Any:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.inner.load_state_dict(state_dict)


class Wrapper(LooksLikeOne, torch.optim.Optimizer):
    """As many published ones: a subclass whose `super().__init__` does not run."""


@pytest.mark.parametrize("made", [LooksLikeOne, Wrapper])
def test_optimizer_without_step_hooks_equals_big_batch(made: Any) -> None:
    class Wrapped(Mixed):
        def configure_optimizers(self) -> Any:
            return made(self.parameters())

    module = Wrapped()
    trainer(WINDOW).fit(module, micro_batches(SEQUENCES))
    assert deviation(module, big_batch(SEQUENCES).end, START) <= 1e-10


def test_steps_skipped_without_step_hooks_are_counted() -> None:
    class Wrapped(Mixed):
        def configure_optimizers(self) -> Any:
            return Wrapper(self.parameters())

    counts = []
    for made in (Wrapped, Mixed):
        fitted = trainer(
            WINDOW, max_epochs=8, **precise("16-mixed", init_scale=2.0**28)
        )
        fitted.fit(made(dtype=torch.float32), micro_batches(SEQUENCES))
        counts.append(windows_of(fitted).num_skipped_steps)
    assert counts[0] == counts[1] > 0
