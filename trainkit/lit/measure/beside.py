"""Passes over some rows, whose BatchNorm layers see all rows."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from trainkit.core._compat import run_backward
from trainkit.core.joins.steps import JoinedSteps
from trainkit.core.joins.turns import Turns
from trainkit.errors import TrainkitError

Others = Callable[[Sequence[int]], tuple[Any, Sequence[int]]]
"""Makes a batch of the rows that are not among some, and says which they are."""


class Beside:
    """Runs some rows beside all others, as a window of exact BatchNorm does.

    The gradient of a pass is that of the loss of its own rows. The step with the first
    of all rows runs first. So one part sees what the steps behind it leave in the
    module, and another what those before it do.

    Args:
        joined: lets the layers see all rows.
        others: makes a batch of the others.
    """

    def __init__(self, joined: JoinedSteps, others: Others) -> None:
        self._joined, self._others = joined, others
        self._results: Generator[Any, None, None] | None = None
        self._turns, self._own = Turns([]), 0

    @contextmanager
    def running(
        self,
        step: Callable[[Any], Any],
        batch: Any,
        rows: Sequence[int],
        turning: Sequence[Any],
    ) -> Iterator[Any]:
        """Within it, the step has run on the rows; the other rows wait.

        Args:
            step: makes the loss of a batch.
            batch: of the rows.
            rows: their numbers.
            turning: what holds something of the rows under way: the draws, first.
        """
        draws = turning[0]

        def run(batch: Any, rows: Sequence[int]) -> Any:
            draws.begin(rows)
            return step(batch)

        others, other_rows = self._others(rows)
        steps = [partial(run, batch, rows), partial(run, others, other_rows)]
        self._own = int(min(rows) > min(other_rows))
        if self._own:
            steps.reverse()
        self._turns = Turns(turning)
        # Segments that run again would draw anew.
        results = self._joined.run(steps, self._turns, in_one_graph=draws.are_any)
        self._results = results
        try:
            if self._own:
                _pull_zeros(next(results))
            yield next(results)
        finally:
            results.close()
            self._results = None

    def rest(self, parameters: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradients that come through the modules that see all rows.

        Args:
            parameters: without gradients.
        """
        if self._results is None:
            return [None for _ in parameters]  # all rows ran at once
        for output in self._results:
            _pull_zeros(output)
        self._joined.backward()
        found = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        self._turns(self._own)
        return found

    def refuse_several(self, terms: Mapping[str, Any]) -> None:
        """Refuse a loss of several terms, whose gradients come apart."""
        if len(terms) > 1:
            raise TrainkitError(
                "training_step: a loss of several terms is not measured beside exact "
                "BatchNorm. Check it with a loss of one term."
            )


def _pull_zeros(output: Any) -> None:
    """Go backward from what `training_step` returned for the others, whose loss does
    not count, so that hooks on the way run as they do in a window."""
    loss = output.get("loss") if isinstance(output, Mapping) else output
    for term in loss.values() if isinstance(loss, Mapping) else [loss]:
        if isinstance(term, Tensor) and term.requires_grad and term.isfinite().all():
            run_backward(term.sum() * 0, [], retain=True, alone=False)
