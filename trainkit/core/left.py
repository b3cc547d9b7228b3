"""What a backward pass has left in the parameters, and whether it is still there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainkit.core._compat import version_of


class Left:
    """The gradients of an open window, as its last pass left them.

    Autograd counts how often a tensor is written over, so a look at these counters
    tells, without a look at any number, whether somebody wrote into the gradients
    between two passes. Only then are they looked at: what is zero now was zeroed,
    unless it was zero before, as where nothing has weighed anything yet.

    Args:
        parameters: whose gradients.
        looks_before: which are zero already is looked at; False takes them for none.
    """

    def __init__(
        self, parameters: Iterable[Tensor], *, looks_before: bool = False
    ) -> None:
        self._held = [
            (p, p.grad, version_of(p.grad)) for p in parameters if p.grad is not None
        ]
        self._were_zero: list[Tensor | int] | None = None
        if looks_before:
            self._were_zero = [_is_zero(gradient) for _, gradient, _ in self._held]

    def __len__(self) -> int:
        return len(self._held)

    def are_zeroed(self) -> Tensor | None:
        """For each gradient, 1 where it has been written over since and is zero now, or
        -1 where it was zero before; None where nobody has written into any. Nothing
        waits for the device."""
        changed = [
            p.grad is not gradient or version_of(gradient) != version
            for p, gradient, version in self._held
        ]
        if True not in changed:
            return None
        were_zero = self._were_zero or [0] * len(changed)
        looked_at = zip(self._held, changed, were_zero, strict=True)
        flags = [
            _is_zero(p.grad) * (1 - 2 * was_zero) if is_changed else 0
            for (p, _, _), is_changed, was_zero in looked_at
        ]
        return _stacked(flags)


def _is_zero(gradient: Tensor | None) -> Tensor | int:
    if gradient is None:
        return 1
    values = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    values = values.coalesce().values() if values.is_sparse else values
    return 1 - values.detach().any().int()


def _stacked(flags: Sequence[Tensor | int]) -> Tensor:
    device = next((f.device for f in flags if isinstance(f, Tensor)), None)
    return torch.stack([torch.as_tensor(f, device=device) for f in flags])
