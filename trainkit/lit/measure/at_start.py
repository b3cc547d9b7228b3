"""The proof at the beginning of a run: is a window of this module the big batch?"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch

from trainkit.core.batch_norm.layers import listed, normalising_by_batch
from trainkit.core.joins.steps import JoinedSteps
from trainkit.core.proof.candidates import line_of
from trainkit.core.proof.gradients import deviation, share_of, size_of
from trainkit.core.proof.weights import least_off
from trainkit.core.split.micro_batching import MicroBatching
from trainkit.core.strategies import Strategies
from trainkit.errors import TrainkitError
from trainkit.lit.callback.base import windows_of
from trainkit.lit.callback.table import say
from trainkit.lit.measure.beside import Beside
from trainkit.lit.measure.clean import (
    NotMeasured,
    aside,
    in_one_line,
    largest,
    lost_text,
    refuse_counted_passes,
    refuse_iterators,
    refuse_unclean,
)
from trainkit.lit.measure.first_rows import FirstRows, InParts, refuse_kept_counts
from trainkit.lit.measure.found import (
    Found,
    Proof,
    doubtful_text,
    exact_text,
    most_of,
    not_exact_text,
    sure,
)
from trainkit.lit.measure.passes import Passes
from trainkit.lit.measure.terms import Pass
from trainkit.lit.measure.window import (
    shares_of,
    strategy_of,
    terms_of,
    window_off_by,
)
from trainkit.lit.rerun.quietly import UNLIKELY, seed

MOST_OF_FIT = 3e-5
"""With the best weights, parts of a loss that looks across rows are off by 1e-3."""

MOST_OF_FIT_IN_FLOAT64 = 1e-9
"""Rounding leaves 1e-15 there, and a term across rows more than 1e-8."""

MOST_ROUNDING = 1e-5
"""Losses that depend on the order of rows do not show what rounding does."""

MOST_WIDE = 2**27
"""With more parameters, none are copied to float64."""


class ProofAtStart:
    """Measures once, on a few rows of the first batch, before the first step.

    Two passes of a few rows are compared with one pass over all of them. Everything is
    put back: not a bit of the training changes. The result is a line after the table,
    or a warning.

    Args:
        trainer: in `fit`.
        pl_module: what it trains.
        strategies: what a micro-batch weighs in each term of the loss.
        proof: `"warn"`; `"require"` refuses to train unless it is exact.
        options: how split windows cut; None for streamed ones.
        move: brings a part of a batch to the device.

    Attributes:
        joined: lets the BatchNorm layers of several passes see all rows, if windows do.
    """

    label = "proof"

    def __init__(
        self,
        trainer: Any,
        pl_module: Any,
        strategies: Strategies,
        proof: Proof,
        *,
        options: MicroBatching | None = None,
        move: Callable[[Any], Any] = lambda batch: batch,
    ) -> None:
        self.joined: JoinedSteps | None = None
        self._trainer, self._module = trainer, pl_module
        self._strategies, self._proof = strategies, proof
        self._options, self._move = options, move
        self._is_alone = trainer.world_size == 1
        self._is_done = False

    def run(self, batch: Any, *args: Any, **kwargs: Any) -> None:
        """Measure on rows of the first batch, and say what was found.

        Args:
            batch: as `training_step` gets it, or on the host for split windows.
            *args: further arguments of `training_step`.
            **kwargs: further keyword arguments of it.
        """
        if self._is_done:
            return
        self._is_done = True
        with self._ranks_apart():
            self._measure(batch, args, kwargs)

    def _measure(self, batch: Any, args: Any, kwargs: Any) -> None:
        rows, number, reason = None, 0, "another rank cannot measure"
        try:
            refuse_unclean(self._trainer, self._module)
            if self.joined is not None:
                refuse_counted_passes(self._trainer)
            rows = self._first_rows(batch)
            number = self._number_of(rows)
        except Exception as error:
            reason = in_one_line(error)
        # The number of rows that every rank can measure with.
        number = -int(largest(self._trainer, -number))
        found, cut = None, None
        if rows is not None and number:
            passes = self._passes(number, args, kwargs, torch.float32)
            try:
                with aside(self._trainer, self._module), passes.prepared():
                    refuse_iterators(passes)
                    found, cut = self._in_float32(passes, rows)
            except Exception as error:
                reason = in_one_line(error)
                self._warn_of_turns(error)
            found, reason = self._unless_lost(passes, found, reason)
        is_open = largest(self._trainer, float(found is not None and found.is_open))
        if is_open and found is not None and cut is not None:
            passes = self._passes(number, args, kwargs, torch.float64)
            with contextlib.suppress(Exception):  # not every operation knows float64
                with aside(self._trainer, self._module):
                    found = found.decided(*self._in_float64(passes, cut))
            found, reason = self._unless_lost(passes, found, reason)
        self._tell(found, reason)

    def _warn_of_turns(self, error: Exception) -> None:
        """Warn of an error that shows where steps take turns, and rows differ."""
        is_known = isinstance(error, NotMeasured | TrainkitError)
        if self.joined is None or is_known or not self._trainer.is_global_zero:
            return
        warnings.warn(
            f"{self.label}: training_step failed on some rows beside others, which "
            f"take turns where it calls a module with BatchNorm: {in_one_line(error)}. "
            f"If it sets something before that call and reads it behind, such as a "
            f"global or an attribute of the Trainer, micro-batches read each other's. "
            f"Use a local variable, or MicroBatching(inside=...).",
            stacklevel=2,
        )

    def _unless_lost(
        self, passes: Passes, found: Found | None, reason: str
    ) -> tuple[Found | None, str]:
        """What was found, or why not; with a warning if training is not as before."""
        if not passes.lost:
            return found, reason
        reason = lost_text(passes)
        text = f"{self.label}: measuring has changed this training: {reason}."
        warnings.warn(f'{text} Choose proof="off".', stacklevel=2)
        return None, reason

    def _ranks_apart(self) -> contextlib.AbstractContextManager[None]:
        """Within it, BatchNorm layers see this rank's rows only: a pass of a few rows
        is no window of all ranks."""
        windows = windows_of(self._trainer)
        sharing = None if windows is None else windows.sharing
        return contextlib.nullcontext() if sharing is None else sharing.none()

    # ---- the rows --------------------------------------------------------------------

    def _first_rows(self, batch: Any) -> FirstRows:
        strategy = next(iter(self._strategies.values()))
        try:
            rows = FirstRows(batch, self._options, strategy)
            _check_number(rows, self._options, self._trainer.train_dataloader)
            return rows
        except NotMeasured:
            raise
        except Exception as error:
            raise NotMeasured(
                f"the rows of the batch cannot be told apart: {in_one_line(error)}"
            ) from error

    def _number_of(self, rows: FirstRows) -> int:
        """How many rows to measure: as many as cost less than the first step."""
        in_step = self._rows_in_step(rows)
        for number in rows.sizes:
            if number <= rows.num_rows and 2 * number <= in_step:
                return number
        raise NotMeasured(
            f"a loader batch has {rows.num_rows} row{'s' * (rows.num_rows != 1)}, and "
            f"a step {in_step}: too few to cut"
        )

    def _rows_in_step(self, rows: FirstRows) -> int:
        return rows.num_rows * self._trainer.accumulate_grad_batches

    # ---- passes ----------------------------------------------------------------------

    def _in_float32(self, passes: Passes, rows: FirstRows) -> tuple[Found, InParts]:
        """The first way to cut the rows in which `training_step` runs."""
        trims = [True, False] if self._options is None else [True]
        several = rows.sizes[passes.num_rows]
        ways = [(sizes, trimmed) for sizes in several for trimmed in trims]
        least: float = 2 * passes.num_rows
        if not self._is_alone:  # a pass may wait for other ranks, so each runs as many
            ways, least = [(several[0], False)], math.inf
        for sizes, trimmed in ways:
            try:
                cut = rows.in_parts(sizes, trims=trimmed)
                once_more = least + sizes[1] <= self._rows_in_step(rows)
                return self._compared(passes, cut, sees_rounding=once_more), cut
            except Exception as error:
                if (sizes, trimmed) == ways[-1] or isinstance(error, NotMeasured):
                    raise
        raise AssertionError("unreachable")

    def _passes(
        self,
        num_rows: int,
        args: Any,
        kwargs: Any,
        dtype: torch.dtype,
    ) -> Passes:
        return Passes(
            self._module,
            num_rows,
            dtype=dtype,
            as_it_is=dtype is torch.float32,
            strategies=self._strategies,
            arguments=(args, kwargs),
            move=self._move,
        )

    def _in_float64(self, passes: Passes, cut: InParts) -> tuple[float, str]:
        """How far the window's gradient is off in float64, and why."""
        if sum(each.numel() for each in passes.parameters) > MOST_WIDE:
            raise NotMeasured("too many parameters to copy")
        with passes.prepared():
            whole, parts = self._run(passes, cut)
            off, _ = self._off_by(whole, parts, cut)
        return off, self._cause(whole, parts, MOST_OF_FIT_IN_FLOAT64)

    def _run(self, passes: Passes, cut: InParts) -> tuple[Pass, list[Pass]]:
        """Passes over the whole and over its parts."""
        if self.joined is not None:
            passes.beside = Beside(self.joined, cut.others)
        whole = passes.run(cut.whole, sorted(sum(cut.rows, [])))
        pairs = zip(cut.parts, cut.rows, strict=True)
        return whole, [passes.run(batch, rows) for batch, rows in pairs]

    def _compared(self, passes: Passes, cut: InParts, *, sees_rounding: bool) -> Found:
        whole, parts = self._run(passes, cut)
        if any(term.is_plain for term in whole.terms):
            raise NotMeasured("manual_backward divides nothing; accumulate is measured")
        if not math.isfinite(sum(term.loss for term in whole.terms)):
            raise NotMeasured("the loss of these rows is not finite")
        if not size_of(whole.gradient):
            raise NotMeasured("the gradient of these rows is zero")
        off, off_in_loss = self._off_by(whole, parts, cut)
        rounding = self._rounding(passes, cut, parts) if sees_rounding else None
        cause = ""
        if off > sure(rounding):
            self._refuse_random(passes, cut.whole, whole)
            refuse_kept_counts(cut, self._strategies.values())
            cause = self._cause(whole, parts)
        return Found(
            off,
            off_in_loss,
            rounding,
            most_of(rounding),
            passes.num_rows,
            cause,
            are_padded=cut.are_padded,
        )

    def _off_by(
        self, whole: Pass, parts: list[Pass], cut: InParts
    ) -> tuple[float, float]:
        """How far the window's gradient and its loss are from the whole's."""
        terms = terms_of(whole, parts)
        shares = {
            name: shares_of(name, strategy_of(name, self._strategies), parts, cut.parts)
            for name in terms
        }
        in_loss = max(
            deviation(
                each.losses.new_tensor([each.loss]), each.losses[:, None], shares[name]
            )
            for name, each in terms.items()
        )
        return window_off_by(terms, shares), in_loss

    def _rounding(
        self, passes: Passes, cut: InParts, parts: list[Pass]
    ) -> float | None:
        """How far the larger part's gradient moves when its rows change their order."""
        rows = cut.rows[-1]
        if len(rows) < 2 or self._options is not None and self._options.collate:
            return None
        strategy = next(iter(self._strategies.values()))
        order = list(reversed(range(len(rows))))
        reversed_batch = FirstRows(cut.parts[-1], self._options, strategy).take(order)
        found = passes.run(reversed_batch, [rows[n] for n in order])
        own = parts[-1].gradient
        moved = share_of(found.gradient - own, own)
        return min(moved, MOST_ROUNDING) if size_of(own) else None

    def _refuse_random(self, passes: Passes, batch: Any, first: Pass) -> None:
        """Refuse to compare passes that draw what cannot be handed out by row."""
        lines, is_repeated = sorted(passes.draws.unlike), True
        if self._is_alone:
            seed(UNLIKELY)
            again = passes.run(batch, range(passes.num_rows))
            is_repeated = torch.equal(again.gradient, first.gradient)
        if lines or not is_repeated:
            unseen = "a generator, or moves an object, that is not known here"
            by = ", ".join(lines)
            raise NotMeasured(
                f"training_step draws by {by}, which cannot be handed out by row"
                if lines
                else f"two passes over the same rows differ: training_step draws from "
                f"{unseen}"
            )
        if first.seen.is_narrow:
            raise NotMeasured("training_step computes in half precision by itself")

    def _cause(
        self, whole: Pass, parts: list[Pass], most_of_fit: float = MOST_OF_FIT
    ) -> str:
        terms = terms_of(whole, parts).values()
        if max(least_off(each.whole, each.parts) for each in terms) <= most_of_fit:
            said = ", ".join(map(line_of, self._strategies.values()))
            return f"The loss does not divide by what {said} counts."
        if self.joined is not None:
            return (
                "The loss, or a layer that is no BatchNorm, looks across the rows of a "
                "batch, or micro-batches change something for each other."
            )
        names = normalising_by_batch(self._module)
        also = f", as BatchNorm does ({listed(names)})" if names else ""
        return f"A layer or the loss looks across the rows of a batch{also}."

    # ---- the verdict -----------------------------------------------------------------

    def _tell(self, found: Found | None, reason: str) -> None:
        """Say what was found, on all ranks alike."""
        trainer = self._trainer
        off = largest(trainer, -1.0 if found is None else found.off)
        is_measured = largest(trainer, float(found is None)) == 0
        own = found is not None and (2 * (found.off > found.most) or found.is_doubtful)
        worst = largest(trainer, float(own))
        if found is None or not is_measured:
            text = f"not measured: {reason}"
            refusal = f'{text}. Check with trainkit.check, or choose proof="warn".'
        elif worst == 2:
            text = refusal = not_exact_text(found, off)
        elif worst == 1:
            text = refusal = doubtful_text(found, off)
        else:
            text, refusal = exact_text(found, off), ""
        if refusal and self._proof == "require":
            raise TrainkitError(f'proof="require": {refusal}')
        if not trainer.is_global_zero:
            return
        if worst == 2 and is_measured:
            warnings.warn(f"{self.label}: {text}", stacklevel=2)
        else:
            say(trainer, (self.label, text))


def _check_number(rows: FirstRows, options: MicroBatching | None, loader: Any) -> None:
    """Refuse rows that are not those of the loader, such as the steps of sequences that
    come first, or nodes of graphs."""
    size, data = getattr(loader, "batch_size", None), getattr(loader, "dataset", None)
    if options is not None or not isinstance(size, int) or not hasattr(data, "__len__"):
        return
    if rows.num_rows != min(size, len(data)):  # type: ignore[arg-type]
        raise NotMeasured(
            f"the first dimension of the batch is {rows.num_rows}, and the loader's "
            f"batch size {size}: it may not be that of the rows"
        )
