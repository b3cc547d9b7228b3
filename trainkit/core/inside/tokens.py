"""Chunks of rows of like length, without the columns that are padding in all of them.

The rows are sorted by length before the module runs, and what it returns is sorted back
after it. A chunk is then a block of rows and of columns. Where an output was left out
as padding it is 0, and the loss must give it no weight.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.core.batch_norm.layers import listed
from trainkit.core.inside.arguments import Arguments
from trainkit.core.inside.chunks import Chunk, Sizes
from trainkit.core.inside.draws import Draws
from trainkit.core.inside.padding import padded_plan, with_columns
from trainkit.core.inside.rows import Plan
from trainkit.core.split.partition import Span, columns_of, partition
from trainkit.core.whole_number import check_whole_number
from trainkit.errors import TrainkitError

LENGTHS = "attention_mask"
POSITIONS = "position_ids"

NUM_PROBES = 2
"""How often one kind of call is looked at."""


class Blocks(Sizes):
    """Chunks that are given, each with its columns.

    Args:
        runs: pairs of the first row and the row behind the last.
        columns: as many pairs of columns.
    """

    def __init__(self, runs: Sequence[Span], columns: Sequence[Span]) -> None:
        super().__init__(1)
        self._given = list(zip(runs, columns, strict=True))

    def cut(self, start: int, stop: int) -> list[Chunk]:
        return [Chunk(*run, columns=columns) for run, columns in self._given]


@dataclass
class Sorted:
    """How the rows of one call are sorted and cut.

    Attributes:
        order: of the rows, longest first.
        runs: the chunks, as places in that order.
        columns: of the chunks.
        spans: the columns of each row that are not padding, in that order.
        width: the padded length.
    """

    order: list[int]
    runs: list[Span]
    columns: list[Span]
    spans: list[Span]
    width: int

    @property
    def is_trimmed(self) -> bool:
        """Whether a chunk leaves out columns."""
        return any(each != (0, self.width) for each in self.columns)

    def sample(self) -> tuple[Chunk, list[Span]]:
        """A chunk of one or two rows that leaves out columns, and these rows' spans."""
        pairs = zip(self.runs, self.columns, strict=True)
        *_, ((start, stop), columns) = (p for p in pairs if p[1] != (0, self.width))
        chunk = Chunk(start, min(start + 2, stop), columns=columns)
        return chunk, self.spans[chunk.start : chunk.stop]

    def values(self, values: Sequence[Any], plan: Plan) -> list[Any]:
        """The arguments with their rows sorted."""
        pairs = zip(values, plan.multiples, strict=True)
        return [self._taken(v, self.order, 0, m) if m else v for v, m in pairs]

    def restored(self, leaves: Sequence[Any], plan: Plan) -> list[Any]:
        """The leaves of the output with their rows as they were."""
        places = sorted(range(len(self.order)), key=self.order.__getitem__)
        return [
            value
            if joint.dim is None
            else self._taken(value, places, joint.dim, joint.multiple)
            for value, joint in zip(leaves, plan.joints, strict=True)
        ]

    def _taken(
        self, value: Tensor, rows: Sequence[int], dim: int, multiple: int
    ) -> Tensor:
        index = torch.tensor(rows).to(value.device, non_blocking=True)
        parts = value.unflatten(dim, (len(self.order), multiple))
        return parts.index_select(dim, index).flatten(dim, dim + 1)


class ByTokens:
    """Cuts calls by a budget of tokens.

    Args:
        tokens: the most tokens of a chunk: its rows times the columns it keeps.
        lengths: the name of the argument that tells rows from their padding: a mask of
            rows and columns, or the rows' lengths.
        size: the most rows of a chunk.
    """

    def __init__(self, tokens: int, lengths: str | None, size: int | None) -> None:
        check_whole_number("Chunked tokens", tokens)
        self._tokens, self._size = tokens, size
        self._lengths = lengths or LENGTHS
        self._plans: dict[Hashable, tuple[Plan, int]] = {}

    def finest(self) -> ByTokens:
        """A copy that cuts each row alone."""
        return ByTokens(1, self._lengths, None)

    def sort(self, call: Arguments, name: str) -> Sorted:
        """Read the lengths, which waits for the device once, and cut the rows."""
        values, paths, rows = call.values, call.paths, call.rows
        if self._lengths not in paths:
            raise TrainkitError(
                f"{name}: a budget of tokens needs the rows' lengths, and its "
                f"arguments are {listed(paths, at_most=9)}. Pass "
                f"{self._lengths!r} by name, or name in lengths= the argument that has "
                f"a mask or the lengths."
            )
        found = values[paths.index(self._lengths)]
        is_fit = isinstance(found, Tensor) and found.ndim in (1, 2)
        if not is_fit or len(found) != rows:
            shape = list(found.shape) if isinstance(found, Tensor) else type(found)
            raise TrainkitError(
                f"{name}: lengths {self._lengths!r} must be a mask of {rows} rows and "
                f"their columns, or {rows} lengths, received {shape}."
            )
        if found.ndim == 1:
            widths = [
                value.shape[1]
                for value in values
                if isinstance(value, Tensor) and value.ndim > 1 and len(value) == rows
            ]
            width = widths[0] if widths else 1
            spans = [(0, min(max(each, 1), width)) for each in found.int().tolist()]
        else:
            width = found.shape[1]
            spans = _spans(found)
            if POSITIONS not in paths:
                spans = self._from_first(spans, width, name)
        groups = partition([spans], size=self._size, tokens=self._tokens)
        ends = list(accumulate(map(len, groups)))
        order = [row for group in groups for row in group]
        return Sorted(
            order,
            runs=list(zip([0, *ends], ends, strict=False)),
            columns=[columns_of([spans], group)[0] for group in groups],
            spans=[spans[row] for row in order],
            width=width,
        )

    def _from_first(self, spans: list[Span], width: int, name: str) -> list[Span]:
        """Spans that begin at column 0, since columns are places there."""
        if any(first for first, _ in spans) and all(end == width for _, end in spans):
            raise TrainkitError(
                f"{name}: its rows are padded on the left, so that a column without "
                f"padding would get another place if others were left out. Pass "
                f"{POSITIONS!r} by name, or pad on the right."
            )
        return [(0, end) for _, end in spans]

    # ---- which dimensions are padded -------------------------------------------------

    def plan(
        self,
        plan: Plan,
        key: Hashable,
        run: Callable[[list[Any]], Any],
        values: Sequence[Any],
        cut: Sorted,
        module: nn.Module,
        draws: Draws,
    ) -> Plan:
        """A plan that also knows which dimensions of arguments and outputs are padded.

        Args:
            plan: which arguments have rows.
            key: what calls of this kind have in common.
            run: runs the module on other arguments.
            values: the arguments, sorted.
            cut: how they are sorted; some chunks leave out columns.
            module: which runs.
            draws: keeps its random states.
        """
        trimmed = with_columns(values, plan, cut.width)
        key = key, trimmed  # a length may equal the padded one by chance
        known, times = self._plans.get(key, (None, 0))
        if known is None or times < NUM_PROBES:
            put_back = draws.keep({v.device for v in values if isinstance(v, Tensor)})
            modes = [(each, each.training) for each in module.modules()]

            def again(given: list[Any]) -> Any:
                put_back()
                return run(given)

            try:
                with torch.no_grad():
                    plan = replace(plan, trimmed=trimmed)
                    known = padded_plan(plan, again, values, cut.sample(), modes)
            finally:
                put_back()
                if torch.is_autocast_cache_enabled():
                    torch.clear_autocast_cache()
                for each, mode in modes:
                    each.training = mode
            self._plans[key] = known, times + 1
        return known


def _spans(mask: Tensor) -> list[Span]:
    """The columns of each row, from the first that counts to the last."""
    marks, width = (mask != 0).to(torch.uint8), mask.shape[1]
    read = [marks.argmax(1), marks.flip(1).argmax(1), marks.amax(1).long()]
    firsts, after, counted = torch.stack(read).tolist()
    return [
        (first, width - behind) if any_ else (0, 1)
        for first, behind, any_ in zip(firsts, after, counted, strict=True)
    ]
