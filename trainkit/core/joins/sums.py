"""The gradients of a call, added up over its chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from trainkit.core._compat import backward_pass
from trainkit.core.gradients import HALF

LARGE = 2**16
"""Gradients of so many entries are added as they arrive; a hook costs little then."""


class Sums:
    """One gradient for each parameter, of which every chunk adds its share.

    Sums of half precision are kept in float32 and rounded once: in bfloat16 a chunk's
    share may be too small to move the sum.

    Args:
        parameters: which get a gradient.

    Attributes:
        is_torn: whether some of a chunk's gradients were added, and not all.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._sums: list[Tensor | None] = [None] * len(parameters)
        self._is_own = [False] * len(parameters)
        self._large = [i for i, each in enumerate(parameters) if _is_large(each)]
        self._arrived: set[int] = set()

    @property
    def is_torn(self) -> bool:
        return bool(self._arrived)

    @contextmanager
    def arriving(
        self, outputs: Sequence[Tensor], sources: Sequence[Tensor]
    ) -> Iterator[None]:
        """Large gradients of the next backward pass are added as they arrive, so that
        it never holds those of all parameters beside their sums.

        Args:
            outputs: that it begins at.
            sources: the parameters, or what stands for them.
        """
        passes: list[int] = []  # another one may run within it, which is not ours

        def begin(_: Tensor) -> None:
            passes.append(backward_pass())

        def added(index: int) -> Callable[[Tensor], Tensor | None]:
            def add(gradient: Tensor) -> Tensor | None:
                if gradient.is_sparse or backward_pass() not in passes[:1]:
                    return None
                self._arrived.add(index)
                self._add(index, gradient)
                return gradient.new_zeros(()).expand_as(gradient)

            return add

        hooks = [each.register_hook(begin) for each in outputs if self._large]
        hooks += [sources[i].register_hook(added(i)) for i in self._large]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Add a chunk's gradients that have not arrived yet; None for a parameter that
        it did not use."""
        totals: list[Tensor] = []
        shares: list[Tensor] = []
        for index, gradient in enumerate(gradients):
            if gradient is None or index in self._arrived:
                continue
            total = self._sums[index]
            is_plain = type(gradient) is type(total) is Tensor
            if total is not None and self._is_own[index] and is_plain:
                totals.append(total)
                shares.append(_widened(gradient))
            else:
                self._add(index, gradient)
        self._arrived.clear()
        if totals:
            torch._foreach_add_(totals, shares)  # pyright: ignore[reportPrivateImportUsage]

    def _add(self, index: int, gradient: Tensor) -> None:
        gradient, total = _widened(gradient), self._sums[index]
        if total is None:
            self._sums[index] = gradient
        elif self._is_own[index]:
            total.add_(gradient)
        else:
            # Out of place: autograd may have given one tensor to two parameters, or an
            # expanded one. Nor does torch add a dense one to a sparse one.
            pair = (gradient, total) if total.is_sparse else (total, gradient)
            self._sums[index] = torch.add(*pair)
            self._is_own[index] = not gradient.is_sparse

    def results(self) -> list[Tensor | None]:
        """The sums, in the parameters' own precision."""
        return [
            None if total is None else total.to(parameter.dtype)
            for total, parameter in zip(self._sums, self._parameters, strict=True)
        ]


def _is_large(parameter: Tensor) -> bool:
    return parameter.numel() >= LARGE and type(parameter) in (Tensor, nn.Parameter)


def _widened(gradient: Tensor) -> Tensor:
    return gradient.float() if gradient.dtype in HALF else gradient
