"""Chunks of rows of like length, without the columns that are padding in all of them.

The rows are sorted by length before the module runs, and what it returns is sorted back
after it. A chunk is then a block of rows and of columns. Where an output was left out
as padding it is 0, and the loss must give it no weight.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.core.batch_norm.layers import listed
from trainkit.core.inside.arguments import Arguments
from trainkit.core.inside.chunks import Chunk, Sizes
from trainkit.core.inside.draws import Draws
from trainkit.core.inside.padding import (
    Columns,
    padded_plan,
    ways_to_trim,
    with_columns,
)
from trainkit.core.inside.rows import Plan, Unfit
from trainkit.core.plan.options import check_whole_number
from trainkit.core.split.partition import Span, columns_of, partition
from trainkit.errors import TrainkitError

LENGTHS = "attention_mask"
POSITIONS = "position_ids"
PADDING = "key_padding_mask"
"""In a mask whose name ends so, True marks padding, as in torch.nn.Transformer."""

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
        widths: the padded length, or those that it may be, the likeliest first.
        mask: the index of the argument that is a mask; None for lengths.
        width: the padded length that was found.
    """

    order: list[int]
    runs: list[Span]
    columns: list[Span]
    spans: list[Span]
    widths: list[int]
    mask: int | None
    width: int = 0

    @property
    def is_trimmed(self) -> bool:
        """Whether a chunk leaves out columns."""
        return self.sample(self.widths[0]) is not None

    def sample(self, width: int) -> tuple[Chunk, list[Span]] | None:
        """A chunk of one or two rows that leaves out columns, and these rows' spans."""
        pairs = zip(self.runs, self.columns, strict=True)
        found = [pair for pair in pairs if pair[1] != (0, width)]
        if not found:
            return None
        # One column would be repeated where an argument keeps them all.
        wide = [pair for pair in found if pair[1][1] - pair[1][0] > 1]
        (start, stop), columns = (wide or found)[-1]
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
        at = paths.index(self._lengths)
        found = values[at]
        is_fit = isinstance(found, Tensor) and found.ndim in (1, 2)
        if not is_fit or len(found) != rows:
            shape = list(found.shape) if isinstance(found, Tensor) else type(found)
            raise TrainkitError(
                f"{name}: lengths {self._lengths!r} must be a mask of {rows} rows and "
                f"their columns, or {rows} lengths, received {shape}."
            )
        if found.ndim == 1:
            spans = [(0, max(each, 1)) for each in found.int().tolist()]
            widths = self._widths(call, max(each for _, each in spans), name)
        else:
            widths = [found.shape[1]]
            spans = _spans(found == 0 if self._lengths.endswith(PADDING) else found)
            if POSITIONS not in paths:
                spans = self._from_first(spans, found.shape[1], name)
        groups = partition([spans], size=self._size, tokens=self._tokens)
        ends = list(accumulate(map(len, groups)))
        order = [row for group in groups for row in group]
        return Sorted(
            order,
            runs=list(zip([0, *ends], ends, strict=False)),
            columns=[columns_of([spans], group)[0] for group in groups],
            spans=[spans[row] for row in order],
            widths=widths,
            mask=None if found.ndim == 1 else at,
        )

    def _widths(self, call: Arguments, longest: int, name: str) -> list[int]:
        """The lengths of arguments that may have columns; features of rows are last."""
        tensors = [
            (value.ndim == 2 and value.is_floating_point(), value.shape[1])
            for value in call.values
            if isinstance(value, Tensor) and value.ndim > 1 and len(value) == call.rows
        ]
        found = [
            width for _, width in sorted(tensors, key=itemgetter(0)) if width >= longest
        ]
        if not found:
            raise TrainkitError(
                f"{name}: the largest of its lengths {self._lengths!r} is {longest}, "
                f"and no argument of {call.rows} rows has as many columns: they are "
                f"{listed(call.paths, at_most=9)}. Give lengths in columns, or a mask."
            )
        return list(dict.fromkeys(found))

    def _from_first(self, spans: list[Span], width: int, name: str) -> list[Span]:
        """Spans that begin at column 0, since columns are places there."""
        is_empty = (0, 1)
        if any(first for first, _ in spans) and all(
            span == is_empty or span[1] == width for span in spans
        ):
            raise TrainkitError(
                f"{name}: in {self._lengths!r} 1 or True must mark tokens, 0 or False "
                f"padding, received a mask whose marks are at the end of rows. If it "
                f"marks padding, pass ~mask. If its rows are padded on the left, a "
                f"column without padding would get another place if others were left "
                f"out: pass {POSITIONS!r} by name, or pad on the right."
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
        # Which lengths equal the padded one by chance is another kind of call.
        found = tuple(with_columns(values, plan, width) for width in cut.widths)
        key = key, found, cut.mask
        known, times = self._plans.get(key, (None, 0))
        if known is None or times < NUM_PROBES:
            put_back = draws.keep({v.device for v in values if isinstance(v, Tensor)})
            modes = [(each, each.training) for each in module.modules()]

            def again(given: list[Any]) -> Any:
                put_back()
                return run(given)

            try:
                with torch.no_grad():
                    known = self._measured(plan, found, again, values, cut, modes)
            finally:
                put_back()
                if torch.is_autocast_cache_enabled():
                    torch.clear_autocast_cache()
                for each, mode in modes:
                    each.training = mode
            self._plans[key] = known, times + 1
        pairs = zip(values, known.columns, strict=True)
        cut.width = next((value.shape[dims[0]] for value, dims in pairs if dims), 0)
        return known

    def _measured(
        self,
        plan: Plan,
        found: Sequence[tuple[Columns, ...]],
        run: Callable[[list[Any]], Any],
        values: Sequence[Any],
        cut: Sorted,
        modes: Sequence[tuple[nn.Module, bool]],
    ) -> Plan:
        """The plan of the first width that fits."""
        refused: Unfit | None = None
        for width, columns in zip(cut.widths, found, strict=True):
            sample = cut.sample(width)
            if sample is None:
                return plan
            try:
                ways = ways_to_trim(columns, cut.mask)
                return padded_plan(plan, ways, run, values, sample, modes)
            except Unfit as error:
                refused = refused or error
        raise Unfit(
            f"{refused}. A mask {self._lengths!r} must mark tokens by 1 or True, and "
            f"size= alone leaves out no columns"
        ) from refused


def _spans(mask: Tensor) -> list[Span]:
    """The columns of each row, from the first that counts to the last."""
    marks, width = (mask != 0).to(torch.uint8), mask.shape[1]
    read = [marks.argmax(1), marks.flip(1).argmax(1), marks.amax(1).long()]
    firsts, after, counted = torch.stack(read).tolist()
    return [
        (first, width - behind) if any_ else (0, 1)
        for first, behind, any_ in zip(firsts, after, counted, strict=True)
    ]
