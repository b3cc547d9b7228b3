"""How the outputs of chunks become those of a call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from trainkit.core.inside.chunks import Chunk
from trainkit.core.inside.closeness import are_close, are_equal, differ
from trainkit.core.nested import Field
from trainkit.errors import TrainkitError

AT_HAND = frozenset({"cpu"})
"""Where values can be read at once."""


class Unfit(TrainkitError):
    """A reason why a call cannot run in chunks of rows."""


@dataclass(frozen=True)
class Joint:
    """How the chunks' values of one output become one value.

    Attributes:
        path: of the output, for messages.
        dim: the dimension that holds the rows; None for a value that has none, which is
            the same for all rows.
        multiple: how many entries of it belong to a row.
        padded: the dimension of columns that chunks leave out, if there is one.
    """

    path: str
    dim: int | None = None
    multiple: int = 1
    padded: tuple[int, ...] = ()

    @property
    def has_rows(self) -> bool:
        return self.dim is not None

    @property
    def name(self) -> str:
        """The output's name for messages."""
        return f"its output {self.path!r}" if self.path else "its output"


Plan = Sequence[Joint]
"""How each output of one kind of call is joined."""


def plan_of(
    some: Sequence[Field], others: Sequence[Field], num: int, num_others: int
) -> Plan:
    """Find how outputs are joined, by those of two numbers of rows.

    Args:
        some: the outputs for some rows.
        others: the outputs for other rows.
        num: how many these are.
        num_others: how many those are; another number.
    """
    if len(some) != len(others):
        raise Unfit("the number of its outputs depends on the rows")
    pairs = zip(some, others, strict=True)
    plan = [_joint(one, other.value, num, num_others) for one, other in pairs]
    if all(joint.dim is None for joint in plan):
        raise Unfit("it returns nothing that has rows")
    return plan


def _joint(field: Field, other: Any, num: int, num_others: int) -> Joint:
    path, value = field
    name = Joint(path).name
    if not isinstance(value, Tensor):
        if not are_equal(value, other):
            raise Unfit(
                f"{name} is a {type(value).__name__}, which cannot be joined from "
                f"those of chunks"
            )
        return Joint(path)
    if not isinstance(other, Tensor) or other.ndim != value.ndim:
        raise Unfit(f"the shape of {name} depends on the rows")
    if value.is_nested or value.layout is not torch.strided:
        raise Unfit(f"{name} is no dense tensor")
    dims = [d for d in range(value.ndim) if value.shape[d] != other.shape[d]]
    if not dims:
        if not are_close(value, other):
            raise Unfit(
                f"{name}, of shape {list(value.shape)}, has no rows, and depends on "
                f"them"
            )
        return Joint(path)
    multiple, rest = divmod(value.shape[dims[0]], num)
    if len(dims) > 1 or rest or other.shape[dims[0]] != multiple * num_others:
        raise Unfit(
            f"the size of {name} does not follow the number of rows: "
            f"{list(value.shape)} for {num} rows, {list(other.shape)} for {num_others}"
        )
    return Joint(path, dims[0], multiple)


def rows_of(value: Tensor, joint: Joint, rows: Sequence[int]) -> Tensor:
    """Some rows of an output that has rows, in this order."""
    assert joint.dim is not None
    index = torch.as_tensor(rows, device=value.device)
    parts = value.unflatten(joint.dim, (-1, joint.multiple))
    return parts.index_select(joint.dim, index).flatten(joint.dim, joint.dim + 1)


class Joined:
    """The leaves of a call's output, with room for all rows.

    Args:
        plan: along which dimension each one is joined.
        num_rows: of the call.
        name: of the module, for messages.
        width: how many columns there are, where chunks leave some out.

    Attributes:
        values: the leaves; complete when each chunk was added.
        differs: whether values without rows were not the same for all chunks, as far as
            nobody has waited for the device that knows it.
    """

    def __init__(self, plan: Plan, num_rows: int, name: str, width: int = 0) -> None:
        self._plan, self._num_rows, self._name = plan, num_rows, name
        self._width = width
        self.values: list[Any] = []
        self.differs: Tensor | None = None

    def add(self, chunk: Chunk, outputs: Sequence[Any]) -> None:
        """Write a chunk's outputs to their place."""
        if len(outputs) != len(self._plan):
            raise TrainkitError(
                f"{self._name}: the number of its outputs depends on the rows: "
                f"{len(self._plan)} before, {len(outputs)} now. Name a module within "
                f"it, or around it."
            )
        self.values = self.values or [None] * len(outputs)
        for index, (joint, value) in enumerate(zip(self._plan, outputs, strict=True)):
            if joint.dim is None:
                self._add_same(index, joint, value, is_first=chunk.start == 0)
                continue
            whole = self.values[index]
            if whole is None:
                whole = self.values[index] = self._room(value, joint, chunk)
            place = chunk.part(whole, joint.dim, joint.multiple, joint.padded)
            if not isinstance(value, Tensor) or place.shape != value.shape:
                self._refuse(joint, list(place.shape), value)
            if whole.dtype != value.dtype:
                self._refuse(joint, whole.dtype, value)
            place.copy_(value.detach())

    def _room(self, value: Any, joint: Joint, chunk: Chunk) -> Tensor:
        assert joint.dim is not None
        wanted = chunk.num_rows * joint.multiple
        if not isinstance(value, Tensor) or value.ndim <= joint.dim:
            self._refuse(joint, [wanted], value)
        shape = list(value.shape)
        if shape[joint.dim] != wanted:
            self._refuse(joint, [wanted, *shape[1:]], value)
        shape[joint.dim] = self._num_rows * joint.multiple
        for dim in joint.padded:
            shape[dim] = self._width
        room = value.new_empty(shape)
        if value.ndim == 4 and not value.is_contiguous():
            if value.is_contiguous(memory_format=torch.channels_last):
                room = room.to(memory_format=torch.channels_last)
        return room.zero_() if joint.padded else room

    def _add_same(
        self, index: int, joint: Joint, value: Any, *, is_first: bool
    ) -> None:
        before = self.values[index]
        is_tensor = isinstance(value, Tensor)
        self.values[index] = value.detach().clone() if is_tensor else value
        if is_first:
            return
        is_same = are_equal(before, value)
        if is_tensor and isinstance(before, Tensor):
            is_same = before.shape == value.shape and before.dtype == value.dtype
            if is_same and before.device.type in AT_HAND:
                is_same = are_close(before, value)
            elif is_same:
                found = differ(before, value)
                self.differs = found if self.differs is None else found | self.differs
        if not is_same:
            raise TrainkitError(
                f"{self._name}: {joint.name} has no rows, and must be the same for all "
                f"chunks, but it was {_shown(before)} for one and {_shown(value)} for "
                f"another. Name a module within it, or around it."
            )

    def _refuse(self, joint: Joint, wanted: Any, value: Any) -> NoReturn:
        is_tensor = isinstance(value, Tensor)
        got = f"{list(value.shape)} {value.dtype}" if is_tensor else type(value)
        raise TrainkitError(
            f"{self._name}: {joint.name} must have one shape and dtype beside its "
            f"rows, to be joined: {wanted} was expected for a chunk, received {got}. "
            f"Name a module within it, or around it."
        )


def _shown(value: Any) -> str:
    if isinstance(value, Tensor) and value.numel() > 1:
        return f"another tensor of shape {list(value.shape)}"
    return repr(value.item() if isinstance(value, Tensor) else value)
