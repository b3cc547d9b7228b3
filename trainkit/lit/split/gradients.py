"""Gradients that are kept or put away for a while."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


class KeptGradients:
    """A copy of gradients, to begin again with.

    Args:
        parameters: whose gradients.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._kept = [
            (p, None if p.grad is None else p.grad.clone()) for p in parameters
        ]

    def restore(self) -> None:
        for parameter, _ in self._kept:
            parameter.grad = None
        for parameter, gradient in self._kept:
            parameter.grad = None if gradient is None else gradient.clone()


class StashedGradients:
    """Gradients put away while something else is in their place.

    Args:
        parameters: whose gradients.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._held = [(p, p.grad) for p in parameters]
        for parameter, _ in self._held:
            parameter.grad = None

    def put_back(self) -> None:
        for parameter, gradient in self._held:
            parameter.grad = gradient
