"""What a proof measures: a few rows, as one batch and as the run's own window."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from trainkit.core.said_weight import Weighed
from trainkit.core.split.micro_batching import MicroBatching, is_inside
from trainkit.core.strategies import AccumulationStrategy, Strategies, Uniform
from trainkit.core.terms import ONE, leading, telling_lengths
from trainkit.lit.proof.rehearse import Rehearsal, refuse_backend
from trainkit.lit.proof.report import MOST_ROUNDING, NotMeasured
from trainkit.lit.proof.rows import (
    POOL,
    FewRows,
    Parts,
    chosen_parts,
    few_rows,
    has_equal_batches,
    unlike_sizes,
)
from trainkit.lit.proof.taken import Alone, Event, Taken, combined, record_events

MOST_PARTS = 6

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
    """

    rehearsal: Rehearsal
    strategies: Strategies
    options: MicroBatching | None
    rows: FewRows
    parts: Parts
    has_batches: bool

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

    @property
    def strategy(self) -> AccumulationStrategy | None:
        """What the first term weighs by; None for plain accumulation."""
        return leading(self.strategies) if self.strategies else None

    @property
    def weights(self) -> Tensor:
        """By what the run weighs the parts; not a number where nobody can say so."""
        strategy = self.strategy or Uniform()
        ones = torch.ones(len(self.parts), dtype=torch.float64)
        if strategy.loss_reduction == "total" and not isinstance(strategy, Uniform):
            return ones
        if isinstance(strategy, Weighed):
            return ones * torch.nan
        each = [float(strategy.weight(self.rows.make(part))) for part in self.parts]
        weights = torch.tensor(each, dtype=torch.float64)
        return weights / weights.sum()

    # ---- rehearsals ------------------------------------------------------------------

    @cached_property
    def as_one(self) -> Taken:
        """What was taken of all rows as one batch."""
        return self.whole()

    @cached_property
    def as_run(self) -> Taken:
        """What was taken of all rows as the run's window."""
        return self.window()

    @cached_property
    def alone(self) -> Alone:
        """What was taken of the parts, each by itself."""
        return Alone.of(self.as_one, [self.whole(part) for part in self.parts])

    def events(self, rows: Sequence[int] | None = None) -> list[Event]:
        """What goes into submodules and comes out, in one step over some rows."""
        return self.changed(record_events).whole(rows).result

    def off(self) -> float:
        """How far the run's window is from the big batch."""
        return self.as_run.off_from(self.as_one)

    def whole(self, rows: Sequence[int] | None = None, **how: Any) -> Taken:
        """One step over some rows as one batch, without any cut.

        By plain Lightning, but where only trainkit can run the module: terms by name,
        sums that are divided, and windows by hand.
        """
        rows = self.all_rows if rows is None else rows
        reductions = {each.loss_reduction for each in self.strategies.values()}
        is_ours = not self.is_plain or "sum" in reductions
        make = self.rows.make
        if self.strategies and is_ours and not self.steps_alone:
            how["strategies"] = as_given(self.strategies)
            if ONE not in self.strategies:
                collate, make = self.rows.collate_of_run, self.rows.loader_batch
                all_at_once: Any = {"collate": collate} if collate else {"trim": False}
                how["options"] = MicroBatching(size=2**30, **all_at_once)
        return self.rehearsal.run([make(rows)], [rows], **how)

    def window(self) -> Taken:
        """One step over all rows as the run would make it."""
        if self.steps_alone and self.options is None:  # a step with each part
            taken = [self.whole(part) for part in self.parts]
            return combined(taken, self.weights.tolist())
        batches = self.loader_batches
        make = self.rows.loader_batch if self.is_split else self.rows.make
        return self.rehearsal.run(
            [make(rows) for rows in batches],
            batches,
            strategies=as_given(self.strategies),
            options=self._small(),
        )

    @property
    def loader_batches(self) -> Parts:
        """The rows of each loader batch of the run's window."""
        if not self.has_batches or self.steps_alone:
            return [self.all_rows]
        if not self.is_split:
            return self.parts
        return [sorted(sum(self.parts[:-1], [])), self.parts[-1]]

    def _small(self) -> MicroBatching | None:
        """Options by which even a few rows are cut."""
        options = self.options
        if options is None:
            return None
        if not self.is_split:
            half = max(1, len(self.all_rows) // 2)
            size = None if options.tokens else 1 if self.has_batches else half
            return replace(options, size=size, tokens=1 if options.tokens else None)
        size, num_rows = max(map(len, self.parts)), len(self.all_rows)
        if options.shapes:
            # One micro-batch is to be filled, and has two rows of its own: what fills
            # is its last row again, which does not change the mean of a single one.
            sizes = [each for each in range(size, num_rows) if num_rows % each > 1]
            size = next(iter(sizes), size)
        return replace(
            options, size=size,
            tokens=options.tokens if options.shapes else None,
            pool=len(self.loader_batches) if options.pool else None,
        )  # fmt: skip


def subject_of(
    rehearsal: Rehearsal,
    strategies: Strategies,
    options: MicroBatching | None,
    batch: Any,
    *,
    trims: bool,
    has_batches: bool,
    most_rows: int,
) -> Subject:
    """Some rows of a training, in parts.

    Args:
        rehearsal: runs them.
        strategies: what a micro-batch weighs; none for plain accumulation.
        options: how loader batches are cut, if they are.
        batch: the first that the loader has yielded.
        trims: whether split windows may leave columns out that are only padding.
        has_batches: whether the run's window has several loader batches.
        most_rows: how many rows, at most.
    """
    refuse_backend(rehearsal.trainer)
    loader, cuts = rehearsal.trainer.train_dataloader, None
    if options is not None and not is_inside(options):
        trims = bool(trims or options.shapes or options.collate)
        cuts, options = options, replace(options, trim=trims)
        # Loader batches have widths of their own, also where none is trimmed.
        cuts = cuts if has_batches else options
    is_split, own = cuts is not None, leading(strategies) if strategies else None
    lengths = telling_lengths(strategies) if strategies else None
    most = max(most_rows, POOL)
    rows = few_rows(loader, batch, cuts, lengths, most, trims=trims)
    number = min(rows.num_rows, most_rows)
    if number < 2:
        raise NotMeasured(f"there is {number} row, which cannot be cut")
    # A single row has no BatchNorm, so four rows are two and two.
    is_equal = number == 4 or not is_split and has_equal_batches(loader)
    is_equal = is_equal and own is not None
    sizes = unlike_sizes(number, MOST_PARTS, is_equal=is_equal)
    parts = chosen_parts(rows, sizes, own or Uniform())
    if is_split and not (trims or has_batches):
        rows = rows.wide
    return Subject(rehearsal, strategies, options, rows, parts, has_batches)


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
