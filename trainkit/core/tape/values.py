"""The values of a batch that Python holds, in the chunks that run at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from trainkit.core.tape.operations import Chunk
from trainkit.core.tape.rows import Layout
from trainkit.errors import TrainkitError


class Values:
    """The values of the first chunk, and of those that run beside it.

    Beside it runs the last chunk. Where a call is checked, so does one more, of all its
    own rows but one, turned round: each must have the same results in other company and
    in another place.

    Args:
        layout: the chunks.
        shared: the tensors that all chunks share.
        is_checked: whether rows must be seen not to see each other.

    Attributes:
        dims: for each slot the dimension that has the rows, or the name of a function
            that made one value of all rows.
        beside: the chunks beside the first; none if there is but one.
        is_checked: whether the second of these is there.
    """

    def __init__(
        self, layout: Layout, shared: list[Tensor], *, is_checked: bool
    ) -> None:
        self._layout = layout
        self._slots: Any = WeakIdKeyDictionary()
        self.dims: dict[int, int | str] = {}
        self.is_checked = is_checked and layout.last > 0
        number = 1 + is_checked if layout.last else 0
        self.beside = [Chunk({}, shared, is_small=True) for _ in range(number)]

    def add(self, first: Tensor, beside: list[Tensor], dim: int | str) -> int:
        """A new slot, for which a tensor stands while Python holds it."""
        slot = len(self.dims)
        self._slots[first], self.dims[slot] = slot, dim
        held = {*self._slots.values()}
        for chunk, value in zip(self.beside, beside, strict=True):
            for each in chunk.values.keys() - held:
                del chunk.values[each]
            chunk.values[slot] = value
        return slot

    def slot_of(self, value: Any) -> int | None:
        """The slot that a tensor stands for, if it is one of the batch's."""
        return self._slots.get(value) if isinstance(value, Tensor) else None

    def held(self) -> dict[int, Tensor]:
        """The values of the first chunk, by their slots."""
        return {slot: tensor for tensor, slot in self._slots.items()}

    def turned(self, first: Tensor, dim: int | str) -> Tensor:
        """All rows of the first chunk but one, from the last to the second."""
        if isinstance(dim, str):
            return first
        many = self._layout.sizes[0]
        by_rows = first.unflatten(dim, (many, first.shape[dim] // many))
        return by_rows.narrow(dim, 1, many - 1).flip(dim).flatten(dim, dim + 1)

    def refuse_mixing(self, slot: int, eps: float, name: str) -> None:
        """Refuse a value that rows have otherwise in other company and other places.

        Args:
            slot: of the value.
            eps: of the least exact type in which the call computes.
            name: of the module.
        """
        dim, first = self.dims[slot], self.held()[slot]
        if not first.is_floating_point() and not first.is_complex():
            return
        wanted, found = self.turned(first, dim), self.beside[1].values[slot]
        eps, apart = max(eps, torch.finfo(first.dtype).eps), (found - wanted).norm()
        if not apart <= eps**0.5 * wanted.norm():
            raise TrainkitError(
                f"exact BatchNorm: the rows of {name} see each other outside of "
                f"BatchNorm layers, or their places count: turned round, and in other "
                f"company, they give other results (off by "
                f"{float(apart / wanted.norm()):.1e}). Do that outside of the module, "
                f"or give a module within to exact BatchNorm."
            )
