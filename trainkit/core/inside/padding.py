"""Whether a loss uses padding that chunks have left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainkit.core.inside.chunks import Chunk
from trainkit.core.inside.outputs import Plan
from trainkit.errors import TrainkitError


class PaddingCheck:
    """Looks in each backward pass whether the loss used padding.

    A CUDA device is waited for in passes 1, 2, 4, 8, ... What the others found is read
    in the next call, which waits for the device anyway, or at the end.
    """

    def __init__(self) -> None:
        self._num_passes = 0
        self._unread: list[tuple[Tensor, str]] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return PaddingCheck, ()  # a copy begins anew

    def look(
        self,
        gradients: Sequence[Tensor | None],
        plan: Plan,
        chunks: Sequence[Chunk],
        name: str,
    ) -> None:
        """Refuse a gradient where the output was left out.

        Args:
            gradients: of the output's leaves.
            plan: how they are joined.
            chunks: of the call.
            name: of the module, for messages.
        """
        self._num_passes += 1
        waits = not self._num_passes & (self._num_passes - 1)
        for gradient, joint in zip(gradients, plan, strict=True):
            if gradient is None or not joint.padded:
                continue
            used = []
            for chunk in chunks:
                rows = chunk.part(gradient, joint.dim, joint.multiple)
                first, behind = chunk.columns or (0, rows.shape[joint.padded[0]])
                rest = rows.shape[joint.padded[0]] - behind
                used.append(rows.narrow(joint.padded[0], 0, first).any())
                used.append(rows.narrow(joint.padded[0], behind, rest).any())
            waits = waits or not runs_later(gradient)
            self._unread.append((torch.stack(used).any(), f"{name}: {joint.name}"))
        if waits:
            self.read()

    def read(self) -> None:
        """Refuse what was found and not read yet."""
        unread, self._unread = self._unread, []
        for is_used, name in unread:
            if is_used:
                raise TrainkitError(
                    f"{name} at padding is used by the loss, and with tokens= it is 0 "
                    f"where no row of a chunk needs it. Give padding no weight in the "
                    f"loss (a mask marks tokens by 1 or True), or cut by size= alone."
                )


def runs_later(tensor: Tensor) -> bool:
    """Whether what is computed from it is read only by waiting for a device."""
    return tensor.is_cuda
