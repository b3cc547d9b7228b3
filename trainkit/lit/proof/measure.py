"""The measurements of a check: the whole, its parts, and how far they are apart."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from trainkit.core.proof.candidates import Candidate, candidates
from trainkit.core.proof.gradients import best_fit, share_of, size_of, weighted
from trainkit.core.proof.parts import telling_parts
from trainkit.core.proof.weights import Counts, Measured
from trainkit.core.strategies import Strategies
from trainkit.errors import TrainkitError
from trainkit.lit.measure.denominators import SIMPLICITY, no_count
from trainkit.lit.measure.passes import Passes
from trainkit.lit.measure.terms import Pass
from trainkit.lit.measure.window import (
    shares_of,
    strategy_of,
    terms_of,
    window_off_by,
)
from trainkit.lit.proof.findings import Gradient
from trainkit.lit.proof.rows import FewRows
from trainkit.lit.rerun.quietly import UNLIKELY, seed

Make = Callable[[Sequence[int]], Any]
Parts = Sequence[Sequence[int]]

THRESHOLDS = {torch.float64: 1e-8, torch.float32: 1e-4, None: 5e-2}
"""What counts as rounding, by the arithmetic. In float64 and float32, exact modules
were off by up to 4e-15 and 7e-7, others by 1e-3 and more. Half precision (None) hides
less than 5e-2."""

MOST_TOLERATED = 1e-3
"""However unlike two passes over the same rows are, more is never called rounding."""

MOST_OF_ORDER = 1e-5
"""More is not rounding: the loss pairs its rows, for example."""

NUM_PARTS = 6
UNCOUNTED = (TrainkitError, KeyError, IndexError, AttributeError, RuntimeError)


class Measurements:
    """Passes over the whole and over parts of a few rows, and what they weigh.

    Args:
        passes: run `training_step`.
        rows: make batches.
        parts: which rows make a part; default: those that tell most.

    Attributes:
        batch: all rows as one batch.
        whole: the pass over it.
        first: the first pass over it, when nothing was neutralised yet.
        repeated: how far a second pass over all rows was from the first.
        tolerance: the largest deviation that counts as rounding.
        parts: rows by which denominators differ as much as they can.
    """

    def __init__(
        self, passes: Passes, rows: FewRows, *, parts: Parts | None = None
    ) -> None:
        self.passes, self.rows = passes, rows
        self.all_rows = list(range(rows.num_rows))
        self.batch = rows.whole()
        self._passes: dict[Any, Pass] = {}
        self.tolerance = THRESHOLDS[passes.dtype]
        self.whole = self.first = self.again()
        self.candidates = candidates(self.batch, _class_weights(passes.module))
        self.parts = parts or self._telling_parts()
        if passes.draws.has_several:
            self._arrange_draws()

    def again(self) -> Pass:
        """Measure the whole, and forget what was measured before."""
        self._passes.clear()
        self.whole = self.passes.run(self.batch, self.all_rows)
        seed(UNLIKELY)
        repeated = self.passes.run(self.batch, self.all_rows)
        size = size_of(self.whole.gradient)
        if not size or not math.isfinite(size):
            raise TrainkitError(
                f"check: the gradient is {'zero' if not size else 'not finite'} on "
                f"these rows, so there is nothing to compare. Give rows that count."
            )
        self.repeated = self._off(repeated)
        least = THRESHOLDS[self.passes.dtype]
        self.tolerance = max(least, min(30 * self.repeated, MOST_TOLERATED))
        return self.whole

    def _off(self, other: Pass) -> float:
        """How far another pass over all rows is from the whole."""
        return share_of(other.gradient - self.whole.gradient, self.whole.gradient)

    def best_fit(self, make: Make) -> float:
        """What is left of the whole with weights that fit best, over all terms."""
        each = self.terms(self.parts, make).values()
        return max(best_fit(one.whole, one.parts).deviation for one in each)

    def _arrange_draws(self) -> None:
        """Find out whether a row's entries of a draw stand together or apart."""
        rows, draws = self.rows, self.passes.draws
        make = rows.padded_alike if rows.can_cut else rows.as_run
        together = self.best_fit(make)
        draws.are_apart = True
        self.again()
        if self.best_fit(make) >= together:
            draws.are_apart = False
            self.again()

    def allow_for_order(self) -> None:
        """Tolerate what another order of the rows changes, as far as that is little:
        some arithmetic may have stayed in float32."""
        order = self.all_rows[::-1]
        batch = self.rows.reordered(order)
        if batch is None:
            return
        off = self._off(self.passes.run(batch, order))
        self.tolerance = max(self.tolerance, 30 * min(off, MOST_OF_ORDER))

    def of(self, rows: Sequence[int], make: Make) -> Pass:
        """The pass over a part."""
        key = make.__name__, tuple(rows)
        if key not in self._passes:
            self._passes[key] = self.passes.run(make(rows), rows)
        return self._passes[key]

    def terms(self, parts: Parts, make: Make) -> dict[str, Measured]:
        """The whole and its parts, for each backward call."""
        return terms_of(self.whole, [self.of(rows, make) for rows in parts])

    def off_by(self, parts: Parts, make: Make, strategies: Strategies) -> float:
        """How far the window of these parts is from the whole, over all terms."""
        terms = self.terms(parts, make)
        each = {name: self.weights(name, strategies, parts, make) for name in terms}
        return window_off_by(terms, each)

    def counts(self, parts: Parts, make: Make) -> dict[Candidate, Counts]:
        """What each candidate counts in the whole and in the parts."""
        batches = [make(rows) for rows in parts]
        found = {}
        for candidate in self.candidates:
            with contextlib.suppress(*UNCOUNTED):
                each = [candidate.weigh(batch) for batch in batches]
                whole = candidate.weigh(self.batch)
                found[candidate] = Counts(whole, torch.tensor(each).double())
        return {**found, **self._seen(parts, make)}

    def _seen(self, parts: Parts, make: Make) -> dict[Candidate, Counts]:
        """What means and quotients of `training_step` have divided by."""
        each = [self.of(rows, make).seen.denominators for rows in parts]
        found = {}
        for line, divisor in self.whole.seen.denominators.items():
            if not all(line in divisors for divisors in each):
                continue
            totals = torch.tensor([divisors[line].total for divisors in each]).double()
            if bool((totals != divisor.total).any()):
                words = divisor.text, divisor.line
                candidate = Candidate(line, no_count, SIMPLICITY, words)
                found[candidate] = Counts(divisor.total, totals)
        return found

    def weights(
        self, term: str, strategies: Strategies, parts: Parts, make: Make
    ) -> Tensor:
        """The share of each part in the window."""
        found = [self.of(rows, make) for rows in parts]
        batches = (make(rows) for rows in parts)
        return shares_of(term, strategy_of(term, strategies), found, batches)

    def by_parameter(
        self, parts: Parts, make: Make, strategies: Strategies
    ) -> list[Gradient]:
        """How far the window of these parts is off in each parameter, worst first."""
        coordinates = self.passes.coordinates
        assert coordinates is not None
        window = torch.zeros_like(self.whole.gradient)
        for name, measured in self.terms(parts, make).items():
            weights = self.weights(name, strategies, parts, make)
            window += weighted(measured.parts, weights).sum(0)
        size = size_of(self.whole.gradient)
        wholes = coordinates.split(self.whole.gradient)
        off = coordinates.split(self.whole.gradient - window)
        found = [
            Gradient(name, size_of(whole) / size, _or_infinity(size_of(each) / size))
            for name, whole, each in zip(self.passes.names, wholes, off, strict=True)
        ]
        return sorted(found, key=lambda each: -each.off)

    def _telling_parts(self) -> list[list[int]]:
        columns = []
        singles = [self.rows.as_run([row]) for row in self.all_rows]
        for candidate in self.candidates:
            with contextlib.suppress(*UNCOUNTED):
                columns.append([candidate.weigh(batch) for batch in singles])
        counts = torch.tensor(columns or [[1.0] * len(singles)]).double().T
        # Of two or three rows, one part would be the whole, and prove nothing.
        return telling_parts(counts, NUM_PARTS, least=2 if len(singles) > 3 else 1)


def _or_infinity(number: float) -> float:
    return math.inf if math.isnan(number) else number


def _class_weights(module: Any) -> dict[str, Tensor]:
    """Vectors of the module that may weigh classes, by their path."""
    found: dict[str, Tensor] = {}
    for path, each in module.named_modules():
        held = {**vars(each), **dict(each.named_buffers(recurse=False))}
        for name, value in held.items():
            if _may_weigh_classes(value):
                found[f"{path}.{name}".lstrip(".")] = value.detach()
    return found


def _may_weigh_classes(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.ndim == 1
        and len(value) > 1
        and value.is_floating_point()
        and not value.requires_grad
        and bool((value >= 0).all())
    )
