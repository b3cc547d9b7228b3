"""The values of a batch that Python holds, in the chunks that run at once."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from trainkit.core.tape.operations import Chunk
from trainkit.core.tape.rows import Layout


class Values:
    """The values of the first chunk, and of the last one, which runs beside it.

    Args:
        layout: the chunks.
        shared: the tensors that all chunks share.

    Attributes:
        dims: for each slot the dimension that has the rows, or the name of a function
            that made one value of all rows.
        last: the last chunk; None if there is but one.
    """

    def __init__(self, layout: Layout, shared: list[Tensor]) -> None:
        self._slots: Any = WeakIdKeyDictionary()
        self.dims: dict[int, int | str] = {}
        self.last = Chunk({}, shared, is_small=True) if layout.last else None

    def add(self, first: Tensor, last: Tensor, dim: int | str) -> int:
        """A new slot, for which a tensor stands while Python holds it."""
        slot = len(self.dims)
        self._slots[first], self.dims[slot] = slot, dim
        if self.last is not None:
            values = self.last.values
            for each in values.keys() - {*self._slots.values()}:
                del values[each]
            values[slot] = last
        return slot

    def slot_of(self, value: Any) -> int | None:
        """The slot that a tensor stands for, if it is one of the batch's."""
        return self._slots.get(value) if isinstance(value, Tensor) else None

    def held(self) -> dict[int, Tensor]:
        """The values of the first chunk, by their slots."""
        return {slot: tensor for tensor, slot in self._slots.items()}
