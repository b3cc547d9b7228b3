"""What a proof measures: a few rows, as one batch and as the run's own window."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from trainkit.core.split.micro_batching import MicroBatching
from trainkit.core.strategies import Strategies, Uniform
from trainkit.core.terms import ONE, telling_lengths
from trainkit.lit.proof.rehearse import Rehearsal
from trainkit.lit.proof.report import MOST_ROUNDING, NotMeasured
from trainkit.lit.proof.rows import FewRows, Parts
from trainkit.lit.proof.taken import Taken, combined

Found = TypeVar("Found")


@dataclass(eq=False)
class Subject:
    """Rows of a training, and the ways to run them.

    Attributes:
        rehearsal: runs steps of copies, whole and parts alike.
        strategies: what a micro-batch weighs, by term; none for plain accumulation.
        options: how loader batches are cut, if they are.
        rows: what batches are made of.
        parts: the rows of each part.
        has_batches: whether the run's window has several loader batches. Each part is
            one, but for split windows, whose last part is one, and all others another.
        are_alike: whether parts keep the width of the whole.
        left_out: is filled with what rehearsals have left out.
    """

    rehearsal: Rehearsal
    strategies: Strategies
    options: MicroBatching | None
    rows: FewRows
    parts: Parts
    has_batches: bool
    are_alike: bool = False
    left_out: list[str] = field(default_factory=list)

    @property
    def trainer(self) -> Any:
        return self.rehearsal.trainer

    @property
    def module(self) -> Any:
        return self.rehearsal.module

    @property
    def all_rows(self) -> list[int]:
        return sorted(row for part in self.parts for row in part)

    @property
    def most_rounding(self) -> float:
        """The largest deviation that is rounding."""
        return MOST_ROUNDING[self.rehearsal.dtype]

    def varied(self, **changes: Any) -> Subject:
        """A subject like this one, of which copies run in another way."""
        return replace(self, rehearsal=replace(self.rehearsal, **changes))

    def changed(self, change: Callable[[Any], Any]) -> Subject:
        """A subject like this one, of which each copy is changed before it runs."""
        return self.varied(changes=(*self.rehearsal.changes, change))

    @property
    def is_split(self) -> bool:
        """Whether loader batches are cut on the host."""
        return self.options is not None and self.options.inside is None

    @property
    def is_plain(self) -> bool:
        """Whether plain Lightning can accumulate the loss."""
        return self.module.automatic_optimization and ONE in self.strategies

    @property
    def steps_alone(self) -> bool:
        """Whether the module steps by hand, and knows nothing of windows."""
        return not (
            self.module.automatic_optimization or hasattr(self.module, "accumulate")
        )

    # ---- rehearsals ------------------------------------------------------------------

    def off(self) -> float:
        """How far the run's window is from the big batch."""
        return self.window().off_from(self.whole())

    def whole(self, rows: Sequence[int] | None = None, **how: Any) -> Taken:
        """One step over some rows as one batch, without any cut.

        By plain Lightning, but where only trainkit can run the module: terms by name,
        sums that are divided, and windows by hand.
        """
        rows = self.all_rows if rows is None else rows
        make, collate = self.rows.make, self.rows.collate_of_run
        reductions = {each.loss_reduction for each in self.strategies.values()}
        is_ours = not self.is_plain or "sum" in reductions
        if self.strategies and is_ours and not self.steps_alone:
            how["strategies"] = as_given(self.strategies)
            if ONE not in self.strategies:
                how["options"] = MicroBatching(size=2**30, trim=False)
                if collate is not None:
                    make = self.rows.loader_batch
                    how["options"] = MicroBatching(size=2**30, collate=collate)
        batch = make(rows, alike=self._keeps_width)
        taken = self.rehearsal.run([batch], [rows], **how)
        self.left_out += taken.draws.left_out
        return taken

    def window(self) -> Taken:
        """One step over all rows as the run would make it."""
        if self.steps_alone and self.options is None:
            return self._by_hand()
        batches = self.loader_batches
        make = self.rows.loader_batch if self.is_split else self.rows.make
        taken = self.rehearsal.run(
            [make(rows, alike=self._keeps_width) for rows in batches],
            batches,
            strategies=as_given(self.strategies),
            options=self._small(),
        )
        self.left_out += taken.draws.left_out
        return taken

    @property
    def loader_batches(self) -> Parts:
        """The rows of each loader batch of the run's window."""
        if not self.has_batches or self.steps_alone:
            return [self.all_rows]
        if not self.is_split:
            return self.parts
        return [sorted(sum(self.parts[:-1], [])), self.parts[-1]]

    def batch(self, rows: Sequence[int]) -> Any:
        """Some rows as one batch, as wide as the run's loader would make it."""
        return self.rows.make(rows, alike=self._keeps_width)

    @property
    def _keeps_width(self) -> bool:
        """Whether rows that are cut from one batch keep its width."""
        if self.are_alike or not self.is_split or self.rows.collates:
            return self.are_alike
        return not (self.has_batches and self.rows.varies)

    def _by_hand(self) -> Taken:
        """The steps that a module takes with each part, weighed and added up."""
        weigh = next(iter(self.strategies.values()), Uniform()).weight
        weights = [float(weigh(self.batch(part))) for part in self.parts]
        shares = [weight / sum(weights) for weight in weights]
        return combined([self.whole(part) for part in self.parts], shares)

    def _small(self) -> MicroBatching | None:
        """Options by which even a few rows are cut."""
        options = self.options
        if options is None:
            return None
        if not self.is_split:
            half = max(1, len(self.all_rows) // 2)
            size = None if options.tokens else 1 if self.has_batches else half
            return replace(options, size=size, tokens=1 if options.tokens else None)
        shapes = None if self.are_alike else options.shapes
        size, num_rows = max(map(len, self.parts)), len(self.all_rows)
        if shapes:
            # One micro-batch is to be filled, and has two rows of its own: what fills
            # is its last row again, which does not change the mean of a single one.
            sizes = [each for each in range(size, num_rows) if num_rows % each > 1]
            size = next(iter(sizes), size)
        return replace(
            options, size=size,
            tokens=options.tokens if shapes else None, shapes=shapes,
            pool=len(self.loader_batches) if options.pool else None,
            trim=options.trim and not self.are_alike,
        )  # fmt: skip


def off_without_padding(
    rehearsal: Rehearsal, strategies: Strategies, options: MicroBatching, batch: Any
) -> tuple[float | None, bool, bool]:
    """How far gradients of four rows are off without the columns that pad on one side
    of all of them; None if rows do not pad, nor can be made to. Whether labels alone
    tell lengths. And whether rows were made to end earlier.

    Rows that do not pad, and rows whose labels alone tell lengths, which may continue
    behind the last one, are made to end earlier.

    Args:
        rehearsal: runs them.
        strategies: what a micro-batch weighs.
        options: how loader batches are cut.
        batch: of the run.
    """
    rows = FewRows(batch, options, telling_lengths(strategies))
    by_labels = rows.labels_alone is not None
    chosen = [rows.shortest(4, side) for side in rows.padded_sides]
    if is_made := by_labels or not chosen:
        some = [row for row, length in enumerate(rows.lengths()) if length > 1]
        chosen = [rows.shortest(4, some)]
        ended = rows.ending(chosen[0]) if some else None
        if ended is None or not any({*chosen[0]} <= {*s} for s in ended.padded_sides):
            return None, by_labels, is_made
        rows, rehearsal = ended, replace(rehearsal, ignored=rows.ignored)
    subject = Subject(rehearsal, strategies, None, rows, [], has_batches=False)
    # Beside a row that begins with the first column, nothing is left out in front.
    offs = [_off_trimmed(replace(subject, parts=[each])) for each in chosen]
    return max(offs), by_labels, is_made


def _off_trimmed(subject: Subject) -> float:
    whole = replace(subject, are_alike=True).whole()
    if not 0 < whole.size < float("inf"):
        raise NotMeasured("the gradient of the shortest rows is zero or not finite")
    off = subject.whole().off_from(whole)
    return off if off > subject.most_rounding else 0.0


def in_first(
    precisions: Sequence[torch.dtype], run: Callable[[torch.dtype], tuple[Found, bool]]
) -> Found:
    """What is found in the first arithmetic in which it runs; where it is not sure that
    what differs in float32 is rounding, in the next.

    Args:
        precisions: that first which is tried first.
        run: what is found in one, and whether it is sure.
    """
    found, failed = list[Found](), list[Exception]()
    for dtype in precisions:
        try:
            each, is_sure = run(dtype)
        except Exception as error:  # not every operation knows float64
            failed.append(error)
            continue
        found.append(each)
        if is_sure or dtype is torch.float64:
            break
    if not found:
        raise failed[0]
    return found[-1]


def as_given(strategies: Strategies) -> Any:
    """Strategies as a user writes them; None if there are none."""
    return strategies.get(ONE, dict(strategies)) if strategies else None
