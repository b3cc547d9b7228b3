"""What a proof measures: a few rows, as one batch and as the run's own window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from trainkit.core.out_of_memory import is_out_of_memory
from trainkit.core.split.micro_batching import MicroBatching
from trainkit.core.strategies import Strategies, Uniform
from trainkit.core.terms import ONE
from trainkit.lit.batch_size.effective import may_be_several
from trainkit.lit.callback.base import WindowOwner
from trainkit.lit.proof.rehearse import PLAIN, Plan, Rehearsals, Taken, combined
from trainkit.lit.proof.rows import FewRows, Parts, collates_by_itself
from trainkit.lit.proof.verdict import MOST_ROUNDING, NotMeasured

FULL_PRECISIONS = ("32-true", "64-true", "32", "64")


@dataclass
class Subject:
    """Rows of a training, and the ways to run them.

    Attributes:
        trainer: to which the module is attached.
        module: in `fit`.
        strategies: what a micro-batch weighs, by term; none for plain accumulation.
        options: how loader batches are cut, if they are.
        rehearsals: run steps of copies.
        rows: what batches are made of.
        parts: the rows of each part.
        has_batches: whether the run's window has several loader batches. Each part is
            one, but for split windows, whose last part is one, and all others another.
        left_out: what rehearsals had to leave out.
        base: what all rehearsals have in common, whole and parts alike.
        are_alike: whether parts keep the width of the whole.
    """

    trainer: Any
    module: Any
    strategies: Strategies
    options: MicroBatching | None
    rehearsals: Rehearsals
    rows: FewRows
    parts: Parts
    has_batches: bool
    left_out: set[str] = field(default_factory=set)
    base: Plan = PLAIN
    are_alike: bool = False

    @property
    def all_rows(self) -> list[int]:
        return sorted(row for part in self.parts for row in part)

    @property
    def most_rounding(self) -> float:
        """The largest deviation that is rounding."""
        return MOST_ROUNDING[self.rehearsals.dtype]

    def in_dtype(self, dtype: torch.dtype) -> Subject:
        """A subject whose rehearsals are in another arithmetic."""
        return replace(self, rehearsals=self.rehearsals.in_dtype(dtype))

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

    @property
    def loader_batches(self) -> Parts:
        """The rows of each loader batch of the run's window."""
        if not self.has_batches:
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

    def whole(self, rows: Sequence[int] | None = None, **options: Any) -> Taken:
        """One step over some rows as one batch, without any cut."""
        rows = self.all_rows if rows is None else rows
        plan = self._whole_plan()
        taken = self.rehearsals.run([self.batch(rows)], [rows], plan, **options)
        if taken.draws.has_dropout:
            self.left_out.add("dropout")
        return taken

    def window(self) -> Taken:
        """One step over all rows as the run would make it."""
        if self.steps_alone:
            return self._by_hand()
        given, options = as_given(self.strategies), self._small(self.options)
        plan = replace(self.base, strategies=given, options=options)
        make = partial(self.rows.loader_batch, alike=self._keeps_width)
        batches = [make(rows) for rows in self.loader_batches]
        return self.rehearsals.run(batches, self.loader_batches, plan)

    def off_without_padding(self) -> float:
        """How far gradients of four rows, or of one if memory runs out, are off without
        padding; 0 if not at all."""
        try:
            return self._off_without_padding(4)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        return self._off_without_padding(1)

    def _off_without_padding(self, number: int) -> float:
        lengths, width = self.rows.lengths(), self.rows.width
        few = [row for row in self.rows.shortest(number) if lengths[row] < width]
        if not few:
            return 0.0
        base = replace(self.base, fixes_draws=True)
        wide = replace(self, options=None, parts=[few], base=base, are_alike=True)
        trimmed, whole = replace(wide, are_alike=False).whole(few), wide.whole(few)
        off = trimmed.off_from(whole)
        if off <= self.most_rounding:
            return 0.0
        if wide.whole(few, seed=1).off_from(whole) > self.most_rounding:
            raise NotMeasured("two steps over the same rows differ")
        return off

    def _by_hand(self) -> Taken:
        """The steps that a module takes with each part, weighed and added up."""
        weighs = [each.weight for each in self.strategies.values()][:1]
        weigh = weighs[0] if weighs else Uniform().weight
        weights = [float(weigh(self.batch(part))) for part in self.parts]
        shares = [weight / sum(weights) for weight in weights]
        return combined([self.whole(part) for part in self.parts], shares)

    def _whole_plan(self) -> Plan:
        """Plain Lightning, but where only trainkit can run the module: terms by name,
        sums that are divided, and windows by hand."""
        reductions = {each.loss_reduction for each in self.strategies.values()}
        if self.steps_alone or not self.strategies:
            return self.base
        if self.is_plain and "sum" not in reductions:
            return self.base
        uncut = (
            None if ONE in self.strategies else MicroBatching(size=2**30, trim=False)
        )
        return replace(self.base, strategies=as_given(self.strategies), options=uncut)

    def _small(self, options: MicroBatching | None) -> MicroBatching | None:
        """Options by which even a few rows are cut."""
        if options is None:
            return None
        if options.inside is not None:
            size = None if options.tokens else 1 if self.has_batches else self.half
            tokens = 1 if options.tokens else None
            return replace(options, size=size, tokens=tokens)
        return replace(
            options, size=max(map(len, self.parts)), tokens=None, overhead=None,
            start=None, trim=options.trim and not self.are_alike,
        )  # fmt: skip

    @property
    def half(self) -> int:
        return max(1, len(self.all_rows) // 2)


def as_given(strategies: Strategies) -> Any:
    """Strategies as a user writes them; None if there are none."""
    return strategies.get(ONE, dict(strategies)) if strategies else None


def check_size(whole: Taken) -> None:
    """Refuse gradients with which nothing can be compared."""
    if not whole.size:
        raise NotMeasured("the gradient of these rows is zero")
    if not whole.size < float("inf"):
        raise NotMeasured("the gradient of these rows is not finite")


def has_parts(trainer: Any, module: Any, windows: WindowOwner) -> bool:
    """Whether a window has several loader batches, or parts of one."""
    return trainer.world_size > 1 or may_be_several(trainer, module, windows)


def refuse_backend(trainer: Any) -> None:
    """Refuse modules that no single device can run as they are."""
    kinds = {cls.__name__ for cls in type(trainer.strategy).__mro__}
    if not kinds & {"SingleDeviceStrategy", "DDPStrategy"}:
        raise NotMeasured(
            f"{type(trainer.strategy).__name__} spreads the module over ranks; check "
            f"with one device: Trainer(devices=1, strategy='auto')"
        )


def left_out_of(trainer: Any, *, collates: bool = False) -> list[str]:
    """What a rehearsal has not done as the run does it, in words."""
    found = []
    precision = str(trainer.precision)
    if precision not in FULL_PRECISIONS:
        found.append(f"precision {precision}")
    if trainer.gradient_clip_val and trainer.lightning_module.automatic_optimization:
        found.append("clipping")
    if not collates and collates_by_itself(trainer.train_dataloader):
        found.append("the collate function")
    return found


def largest(trainer: Any, number: float) -> float:
    """The largest of a number on all ranks."""
    if trainer.world_size == 1:
        return number
    device = trainer.strategy.root_device
    given = torch.tensor([number], dtype=torch.float32, device=device)
    return float(trainer.strategy.all_gather(given).max())
