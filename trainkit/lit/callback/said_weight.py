"""The weight that a module gives to its own loss, while `training_step` runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trainkit.core.said_weight import Weighed, said_weight
from trainkit.core.strategies import (
    AccumulationStrategy,
    PerSample,
    Strategies,
    Weight,
)
from trainkit.core.terms import leading
from trainkit.errors import TrainkitError


class SaidWeight:
    """What `self.weigh()` has said of the loss of the `training_step` under way."""

    def __init__(self) -> None:
        self._said: Weight | None = None
        self._is_open = False

    @contextmanager
    def open(self) -> Iterator[None]:
        """A context for one run of `training_step`, in which a weight may be said; what
        nobody takes is dropped at its end."""
        self._is_open = True
        try:
            yield
        finally:
            self._said, self._is_open = None, False

    def say(self, number: Any, strategy: AccumulationStrategy, hook: str) -> None:
        """Take a weight from the module.

        Args:
            number: the weight.
            strategy: weighs the micro-batch.
            hook: the module's hook that runs.
        """
        said = said_weight(number, "self.weigh(n)")
        is_asked = isinstance(strategy, Weighed) and strategy.is_said
        if not (is_asked and self._is_open):
            raise TrainkitError(
                f"self.weigh({_shown(said)}): it says in training_step what the loss "
                f"divides by, with accumulation=Weighed(), and was called in "
                f"{hook or 'no hook'} with accumulation={strategy!r}, so this number "
                f"would be lost. Leave it out; to log a mean in validation, pass the "
                f"number to self.log_exact(..., weight=n)."
            )
        if self._said is not None:
            raise TrainkitError(
                f"self.weigh({_shown(said)}): this loss was weighed already, with "
                f"{_shown(self._said)}. Call it once for each loss, with all that the "
                f"mean divides by; in manual optimization before each accumulate()."
            )
        self._said = said

    def take(self, strategy: Weighed, pl_module: Any, batch: Any) -> Weight:
        """The weight of the loss that `training_step` has made of a batch.

        Args:
            strategy: may count by a function.
            pl_module: whose `training_step`.
            batch: as it got it.
        """
        if not strategy.is_said:
            return strategy.counted(pl_module, batch)
        said = self.look(f"{type(pl_module).__name__}.training_step")
        self._said = None
        return said

    def look(self, who: str = "log_exact()") -> Weight:
        """The weight said so far; `who` wants it, for an error."""
        if self._said is None:
            raise TrainkitError(
                f"{who}: with accumulation=Weighed() it needs what its loss divides "
                f"by, and self.weigh() was not called for this loss. Call "
                f"self.weigh(n) in training_step before the loss is used, with 0 where "
                f"nothing counts; pass weight=n to self.accumulate() or "
                f"self.log_exact(); or name a function that counts: Weighed(by=...)."
            )
        return self._said

    def refuse_unused(self) -> None:
        """Refuse a weight that manual optimization has said of no loss."""
        if self._said is not None:
            raise TrainkitError(
                f"self.weigh({_shown(self._said)}): no loss took this weight. Call it "
                f"right before self.accumulate(loss), and leave it out where "
                f"accumulate() gets weight=, which comes first."
            )


def says_weights(strategies: Strategies) -> bool:
    """Whether micro-batches have no weight before `training_step` has seen them. One of
    several terms must have: their totals are needed before."""
    return len(strategies) == 1 and isinstance(leading(strategies), Weighed)


def counts_rows(strategy: AccumulationStrategy) -> bool:
    """Whether what a micro-batch weighs is the number of its samples."""
    return type(strategy) is PerSample and strategy.mask is None


def _shown(weight: Weight) -> str:
    """A weight for an error; a tensor stays where it is."""
    return "n" if not isinstance(weight, int | float) else f"{weight:g}"
