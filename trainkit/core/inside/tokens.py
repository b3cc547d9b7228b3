"""Chunks of rows of like length, without the columns that are padding in all of them.

The rows are sorted by length before the module runs, and what it returns is sorted back
after it. A chunk is then a block of rows and of columns. A dimension is cut that is as
wide as the mask, and was so in all calls before. Where an output was left out as
padding it is 0, and the loss must give it no weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from trainkit.core.batch_norm.layers import listed
from trainkit.core.inside.chunks import Chunk, Sizes, Span
from trainkit.core.inside.closeness import are_close
from trainkit.core.inside.cut import Cut
from trainkit.core.inside.moment import Moment
from trainkit.core.inside.outputs import Joint, Plan, Unfit, rows_of
from trainkit.core.inside.padding import PaddingCheck
from trainkit.core.inside.rows import Arguments, reordered
from trainkit.core.inside.trial import looking
from trainkit.core.plan.options import check_whole_number
from trainkit.core.split.partition import columns_of, partition
from trainkit.core.split.rows import spans_of
from trainkit.errors import TrainkitError

LENGTHS = "attention_mask"
POSITIONS = "position_ids"


@dataclass
class Sorted:
    """How the rows of one call are sorted and cut.

    Attributes:
        order: of the rows, longest first.
        chunks: blocks of rows, as places in that order, and of columns.
        spans: the columns of each row that are not padding, in that order.
        width: how many columns there are.
    """

    order: list[int]
    chunks: list[Chunk]
    spans: list[Span]
    width: int

    def values(self, arguments: Arguments) -> list[Any]:
        """The arguments with their rows sorted."""
        pairs = zip(arguments.values, arguments.cut, strict=True)
        return [reordered(x, self.order) if is_cut else x for x, is_cut in pairs]

    def restored(self, leaves: Sequence[Any], plan: Plan) -> list[Any]:
        """The leaves of the output with their rows as they were."""
        places = sorted(range(len(self.order)), key=self.order.__getitem__)
        pairs = zip(leaves, plan, strict=True)
        return [
            rows_of(x, joint, places) if joint.has_rows else x for x, joint in pairs
        ]

    def sample(self) -> Chunk | None:
        """A row or two of a chunk that leaves out columns, if there is one."""
        for chunk in reversed(self.chunks):
            if chunk.columns != (0, self.width):
                stop = min(chunk.start + 2, chunk.stop)
                return replace(chunk, stop=stop)
        return None


class ByTokens:
    """Cuts calls by a budget of tokens.

    Args:
        tokens: the most tokens of a chunk: its rows times the columns it keeps.
        lengths: the name of the argument that is a mask of rows and columns, 0 at
            padding; default: `"attention_mask"`.
        size: the most rows of a chunk.

    Attributes:
        padding: checks that the loss uses none.
    """

    def __init__(self, tokens: int, lengths: str | None, size: int | None) -> None:
        check_whole_number("Chunked tokens", tokens)
        self._tokens, self._size = tokens, size
        self._lengths = lengths or LENGTHS
        self._wide: dict[tuple[str, int], bool] = {}  # as wide as the mask, always
        self._plans: dict[Any, Plan] = {}
        self.padding = PaddingCheck()

    def sizes(self, width: int) -> Sizes:
        """The most rows of a chunk that leaves out no columns."""
        most = max(1, self._tokens // max(width, 1))
        return Sizes(most if self._size is None else min(most, self._size))

    def sort(self, arguments: Arguments, name: str) -> Sorted:
        """Read the lengths, which waits for the device once, and cut the rows."""
        paths, rows = arguments.paths, arguments.rows
        if self._lengths not in paths:
            raise TrainkitError(
                f"{name}: a budget of tokens needs the rows' lengths, and its "
                f"arguments are {listed(paths, at_most=9)}. Pass {self._lengths!r} by "
                f"name, or name in lengths= the argument that is a mask."
            )
        mask = arguments.values[paths.index(self._lengths)]
        is_mask = isinstance(mask, Tensor) and mask.ndim == 2 and len(mask) == rows
        if not is_mask:
            shape = list(mask.shape) if isinstance(mask, Tensor) else type(mask)
            raise TrainkitError(
                f"{name}: lengths {self._lengths!r} must be a mask of {rows} rows and "
                f"their columns, 1 or True at tokens, received {shape}."
            )
        self.padding.read()  # the device is waited for now
        spans = spans_of(mask)
        if POSITIONS not in paths:
            spans = self._from_first(spans, mask.shape[1], name)
        groups = partition([spans], size=self._size, tokens=self._tokens)
        ends = list(accumulate(map(len, groups)))
        chunks = [
            Chunk(start, stop, columns_of([spans], group)[0])
            for start, stop, group in zip([0, *ends], ends, groups, strict=False)
        ]
        order = [row for group in groups for row in group]
        return Sorted(order, chunks, [spans[row] for row in order], mask.shape[1])

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

    def trimmed(
        self, cut: Cut, arguments: Arguments, plan: Plan, cuts: Sorted, *, looks: bool
    ) -> tuple[Arguments, Plan]:
        """The arguments and the plan, which know now what is cut to columns.

        Args:
            cut: which is called.
            arguments: of the call, sorted.
            plan: how outputs are joined.
            cuts: how the rows are sorted.
            looks: whether to look if the module computes the same without padding.
        """
        pairs = zip(arguments.paths, arguments.values, arguments.cut, strict=True)
        padded = [self._padded(*each, cuts.width) for each in pairs]
        sample = cuts.sample()
        if sample is None:
            return arguments, plan
        arguments, key = replace(arguments, padded=padded), (*plan, *padded)
        if looks or key not in self._plans:
            self._plans[key] = self._look(cut, arguments, plan, cuts, sample)
        return arguments, self._plans[key]

    def _padded(
        self, path: str, value: Any, has_rows: bool, width: int
    ) -> tuple[int, ...]:
        dims = range(has_rows, value.ndim) if isinstance(value, Tensor) else ()
        for dim in dims:
            fits = value.shape[dim] == width
            self._wide[path, dim] = fits and self._wide.get((path, dim), True)
        return tuple(dim for dim in dims if self._wide[path, dim])

    def _look(
        self, cut: Cut, arguments: Arguments, plan: Plan, cuts: Sorted, sample: Chunk
    ) -> Plan:
        """Refuse a module that computes something else without padding."""
        assert sample.columns is not None
        moment = Moment(cut.module, cut.name, arguments.devices)
        with looking(cut, arguments, moment) as trial:
            whole, narrow = trial.with_and_without(sample)
            pairs = zip(plan, whole, narrow, strict=True)
            joints = [
                _without_columns(*each, sample) if each[0].has_rows else each[0]
                for each in pairs
            ]
            for joint, one, other in zip(joints, whole, narrow, strict=True):
                if not joint.has_rows:
                    continue
                kept = sample.part(one, None, 1, joint.padded)
                marks = _marks(kept, cuts.spans, sample, joint)
                is_same = kept.shape == other.shape
                if not is_same or not are_close(kept * marks, other * marks):
                    raise Unfit(
                        f"{joint.name} of a row depends on the columns that are "
                        f"padding. Every dimension of an argument that is as wide as "
                        f"the mask {self._lengths!r}, {cuts.width}, is cut, and the "
                        f"mask must mark tokens by 1 or True. Give other arguments "
                        f"another width, or cut by size= alone"
                    )
        return joints


def _without_columns(joint: Joint, one: Tensor, other: Tensor, sample: Chunk) -> Joint:
    """A joint that knows which dimension of an output has the columns."""
    sizes = zip(one.shape, other.shape, strict=False)
    dims = [dim for dim, (all_, some) in enumerate(sizes) if all_ != some]
    return replace(joint, padded=tuple(dims[:1]))


def _marks(value: Tensor, spans: Sequence[Span], sample: Chunk, joint: Joint) -> Tensor:
    """1 where an output is no padding."""
    marks = torch.ones_like(value, dtype=torch.bool)
    if not joint.padded or joint.dim is None or sample.columns is None:
        return marks
    start, stop = sample.columns
    for row, (first, behind) in enumerate(spans[sample.start : sample.stop]):
        own = marks.narrow(joint.dim, row * joint.multiple, joint.multiple)
        own.narrow(joint.padded[0], 0, first - start).zero_()
        own.narrow(joint.padded[0], behind - start, stop - behind).zero_()
    return marks
