"""Comparisons of many rows at once with chunks of them, in a call that is probed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from trainkit.core.inside.chunks import Chunk
from trainkit.core.inside.probe import Probe, is_no_place_for_hooks
from trainkit.core.inside.rows import (
    OTHER_NUMBER,
    Plan,
    Unfit,
    are_close,
    are_equal,
    output_name,
    taken,
)
from trainkit.core.inside.sums import Sums
from trainkit.core.nested import Field
from trainkit.core.out_of_memory import is_out_of_memory

ROWS = 4
"""The most rows whose gradient is compared with that of their halves."""

EPS_ON_DEVICE = 2**-11
"""Kernels of a device may round products to so few digits (TF32)."""


class Compared:
    """Some rows of a call that is probed, at once and in chunks.

    Args:
        plan: which arguments have rows, and how outputs are joined.
        probe: runs the module; in evaluation mode if it draws.
        values: the arguments.
        num_rows: how many rows they have.
    """

    def __init__(
        self, plan: Plan, probe: Probe, values: Sequence[Any], num_rows: int
    ) -> None:
        self._plan, self._probe, self._values = plan, probe, values
        self._num_rows = num_rows
        self._evaluates = probe.draws_in_training

    def _given(self, rows: Sequence[int]) -> list[Any]:
        pairs = zip(self._values, self._plan.multiples, strict=True)
        return [taken(x, rows, m, self._num_rows) if m else x for x, m in pairs]

    def outputs(self, first: Chunk, second: Chunk) -> None:
        """Refuse outputs of two chunks of rows at once that are not those of each."""
        rows = [*range(first.start, first.stop), *range(second.start, second.stop)]
        chunks = Chunk(0, first.num_rows), Chunk(first.num_rows, len(rows))
        probe, joints = self._probe, self._plan.joints
        if not self.can_be:
            return
        whole = probe(self._given(rows), evaluates=self._evaluates)
        if (self._evaluates and probe.has_drawn) or len(whole) != len(joints):
            return  # nothing can be compared, or the mode returns something else
        for chunk in chunks:
            part = rows[chunk.start : chunk.stop]
            found = probe(self._given(part), evaluates=self._evaluates)
            for joint, one, other in zip(joints, whole, found, strict=True):
                if joint.dim is None or not isinstance(one.value, Tensor):
                    continue
                own = chunk.part(one.value, joint.dim, joint.multiple)
                if not are_close(own, other.value, times=OTHER_NUMBER):
                    raise Unfit(
                        f"{output_name(one.path)} for {len(rows)} rows is not that for "
                        f"chunks of them, as where experts have a capacity"
                    )

    def gradients(self, most: int | None) -> None:
        """Refuse a gradient of some rows that is not the sum of their halves'.

        A hook or an own backward pass may mix rows that the forward pass keeps apart.

        Args:
            most: the most rows of a chunk; None for all.
        """
        num = min(self._num_rows, ROWS if most is None else max(2, min(most, ROWS)))
        last = self._num_rows - num
        # Once more on other rows: a kink may lie where rounding differs.
        if not self.can_be:
            return
        try:
            is_mixed = all(self._is_mixed(range(at, at + num)) for at in (0, last))
        except RuntimeError as error:
            if not is_no_place_for_hooks(error):
                raise
            return
        if is_mixed:
            raise Unfit(
                "the gradient of rows at once is not the sum of their gradients in "
                "chunks, though their outputs are alike. A hook or a backward pass of "
                "its own looks at all rows; or an argument as long as the batch has "
                "no rows, and belongs in shared="
            )

    def _is_mixed(self, rows: range) -> bool:
        given, probe = self._given(rows), self._probe
        leaves = probe.leaves_of(given)
        total = _Total([*probe.parameters, *leaves])
        if not total.sources:
            return False
        middle = len(rows) // 2
        for chunk, sign in (
            (Chunk(0, len(rows)), 1),
            (Chunk(0, middle), -1),
            (Chunk(middle, len(rows)), -1),
        ):
            if not self._pull(total, given, chunk, sign):
                return False
        if probe.draws_backward:
            return False
        rounding = 3 * max(total.eps, probe.eps) ** 0.5
        return bool(total.sizes[0] * rounding < total.sizes[-1] < torch.inf)

    def _pull(
        self,
        total: _Total,
        given: Sequence[Any],
        chunk: Chunk,
        sign: int,
    ) -> bool:
        """Add the gradient of some rows; returns whether that can be compared."""
        plan, probe = self._plan, self._probe
        with probe.graph(
            lambda: [
                chunk.part(x, 0, m) if m else x
                for x, m in zip(given, plan.multiples, strict=True)
            ],
            evaluates=self._evaluates,
        ) as outputs:
            is_drawn = self._evaluates and probe.has_drawn
            if is_drawn or len(outputs) != len(plan.joints):
                return False
            pulled = [
                (x, sign * _direction(x, joint.dim, chunk.start * joint.multiple))
                for x, joint in zip(outputs, plan.joints, strict=True)
                if isinstance(x, Tensor) and x.requires_grad and joint.dim is not None
            ]
            if not pulled:
                return False
            total.add(pulled)
        return True

    @cached_property
    def can_be(self) -> bool:
        """Whether rows run without random numbers, if need be in evaluation mode."""
        try:
            self._probe(self._given([0]), evaluates=self._evaluates)
        except Exception as error:
            if not self._evaluates or is_out_of_memory(error):
                raise
            return False
        return True

    def uses(self, others: Mapping[int, Any]) -> bool:
        """Whether outputs of some rows change with other values of some arguments."""
        given = self._given(range(min(self._num_rows, ROWS)))
        changed = [others.get(index, value) for index, value in enumerate(given)]
        try:
            pair = [self._probe(each) for each in (given, changed)]
            return not all(map(_are_alike, *pair))
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return True

    def shared_draws(self) -> list[str]:
        """What is drawn at random once for all rows, as operators and shapes."""
        rows = range(min(self._num_rows, ROWS))
        one, two = (self._probe.drawn(self._given(each)) for each in (rows, rows[1:]))
        return [name for name, times in one.items() if two.get(name) == times]


def _are_alike(one: Field, other: Field) -> bool:
    if isinstance(one.value, Tensor) and isinstance(other.value, Tensor):
        return are_close(one.value, other.value)
    return are_equal(one.value, other.value)


class _Total:
    """The sum of gradients, its size so far, and the rounding of what it is made of.

    Args:
        sources: which get a gradient.
    """

    def __init__(self, sources: Sequence[Tensor]) -> None:
        self.sources, self._sums = sources, Sums(sources)
        self.sizes: list[float] = []
        self.eps = 0.0

    def add(self, pulled: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Run a backward pass from outputs, with their gradients."""
        outputs, given = map(list, zip(*pulled, strict=True))
        with self._sums.arriving(outputs, self.sources):
            found = torch.autograd.grad(outputs, self.sources, given, allow_unused=True)
        self._sums.add(found)
        sums = [each for each in self._sums.results() if each is not None]
        squares = [each.detach().double().norm().square().cpu() for each in sums]
        self.sizes.append(float(sum(squares)) ** 0.5)
        self.eps = max([self.eps, *map(_eps_of, outputs), *map(_eps_of, sums)])


def _eps_of(value: Tensor) -> float:
    kind, dtypes = value.device.type, [value.dtype]
    if torch.is_autocast_enabled(kind):
        dtypes.append(torch.get_autocast_dtype(kind))
    least = EPS_ON_DEVICE if kind != "cpu" else 0.0
    return max([least, *(torch.finfo(dtype).eps for dtype in dtypes)])


def _direction(value: Tensor, dim: int, start: int) -> Tensor:
    """A gradient that gives each row its own, whichever rows are beside it."""
    places = torch.arange(value.numel(), device=value.device)
    inner = value.movedim(dim, 0)
    wide = (places + start * inner[0].numel()).double().mul(1.7).cos()
    return wide.view(inner.shape).movedim(0, dim).to(value.dtype)
