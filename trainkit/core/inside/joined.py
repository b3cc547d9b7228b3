"""The outputs of a call, written chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainkit.core.inside.chunks import Chunk
from trainkit.core.inside.rows import (
    Joint,
    Plan,
    are_close,
    are_equal,
    differ,
    output_name,
)
from trainkit.errors import TrainkitError

AT_HAND = frozenset({"cpu"})
"""Where values can be read at once."""


class Joined:
    """The leaves of a call's output, with room for all rows.

    Args:
        plan: along which dimension each one is joined.
        num_rows: of the call.
        name: of the module, for messages.
        width: how many columns there are, where chunks leave some out.
        waits: whether to wait for a device to compare tensors that have no rows.

    Attributes:
        differs: whether such tensors differ, as far as that was not waited for.
        values: the leaves; complete when each chunk was added.
    """

    def __init__(
        self,
        plan: Plan,
        num_rows: int,
        name: str,
        width: int = 0,
        *,
        waits: bool = False,
    ) -> None:
        self._plan, self._num_rows, self._name = plan, num_rows, name
        self._width, self._waits = width, waits
        self.values: list[Any] = []
        self.differs: Tensor | None = None

    def add(self, chunk: Chunk, outputs: Sequence[Any]) -> None:
        """Write a chunk's outputs to their place."""
        if len(outputs) != len(self._plan.joints):
            raise TrainkitError(
                f"{self._name}: the number of its outputs depends on the rows: "
                f"{len(self._plan.joints)} before, {len(outputs)} now. Name a module "
                f"within it, or around it."
            )
        if not self.values:
            self.values = [None] * len(outputs)
        for index, (joint, value) in enumerate(
            zip(self._plan.joints, outputs, strict=True)
        ):
            whole = self.values[index]
            if joint.dim is None:
                self._check_same(index, whole, value, is_first=chunk.start == 0)
                same = value.detach().clone() if isinstance(value, Tensor) else value
                self.values[index] = same
                continue
            if whole is None:
                self._check(index, value, chunk.num_rows)
                whole = self.values[index] = self._room(value, joint, chunk)
            place = chunk.part(whole, joint.dim, joint.multiple, joint.padded)
            if place.shape != value.shape or whole.dtype != value.dtype:
                self._refuse(index, list(place.shape), value)
            place.copy_(value.detach())

    def _room(self, value: Tensor, joint: Joint, chunk: Chunk) -> Tensor:
        shape = list(value.shape)
        if joint.dim is not None:
            shape[joint.dim] = joint.multiple * self._num_rows
        if joint.padded is not None:
            shape[joint.padded] = self._width
        room = torch.empty(
            shape,
            dtype=value.dtype,
            device=value.device,
            memory_format=_format_of(value),
        )
        return room if joint.padded is None else room.zero_()

    def _check_same(self, index: int, one: Any, other: Any, *, is_first: bool) -> None:
        if is_first:
            return
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            is_same = one.shape == other.shape and one.dtype == other.dtype
            if is_same and (self._waits or one.device.type in AT_HAND):
                is_same = are_close(one, other)
            elif is_same:
                found = differ(one, other)
                self.differs = found if self.differs is None else found | self.differs
        else:
            is_same = are_equal(one, other)
        if not is_same:
            name = output_name(self._plan.paths[index])
            raise TrainkitError(
                f"{self._name}: {name} has no rows, and must be the same for all "
                f"chunks, but it was {_shown(one)} for one and {_shown(other)} for "
                f"another. Name a module within it, or around it."
            )

    def _check(self, index: int, value: Any, rows: int) -> None:
        joint = self._plan.joints[index]
        wanted, dim = rows * joint.multiple, joint.dim or 0
        if not isinstance(value, Tensor) or value.ndim <= dim:
            self._refuse(index, [wanted], value)
        if value.shape[dim] != wanted:
            self._refuse(index, [wanted, *value.shape[1:]], value)

    def _refuse(self, index: int, wanted: list[int], value: Any) -> None:
        is_tensor = isinstance(value, Tensor)
        got = f"{list(value.shape)} {value.dtype}" if is_tensor else type(value)
        name = output_name(self._plan.paths[index])
        raise TrainkitError(
            f"{self._name}: {name} must have one shape and dtype beside its rows, to "
            f"be joined: {wanted} was expected for a chunk, received {got}. Name a "
            f"module within it, or around it."
        )


def _shown(value: Any) -> str:
    if isinstance(value, Tensor) and value.numel() > 1:
        return f"another tensor of shape {list(value.shape)}"
    return repr(value.item() if isinstance(value, Tensor) else value)


def _format_of(value: Tensor) -> torch.memory_format:
    if value.ndim == 4 and not value.is_contiguous():
        if value.is_contiguous(memory_format=torch.channels_last):
            return torch.channels_last
    return torch.contiguous_format
