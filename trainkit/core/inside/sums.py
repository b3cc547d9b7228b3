"""The gradients of a call, added up over its chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from trainkit.core._compat import backward_pass
from trainkit.core.gradients import HALF
from trainkit.core.inside.chunks import Chunk

LARGE = 2**16
"""Gradients of so many entries are added as they arrive; a hook costs little then."""


class Shares(Protocol):
    """Looks at what each chunk of a call adds to the gradients."""

    def see(self, gradient: Tensor) -> None:
        """A chunk's share of the gradient of one parameter."""

    def end_chunk(self, num_rows: int) -> None:
        """All shares of a chunk have been seen."""

    def end(self, gradients: Sequence[Tensor | None]) -> None:
        """All chunks have been seen; their sums."""


class Sums:
    """One gradient for each parameter, of which every chunk adds its share.

    Sums of half precision are kept in float32 and rounded once: in bfloat16 a chunk's
    share may be too small to move the sum.

    Args:
        parameters: which get a gradient.
        shares: looks at each chunk's, if somebody asks for it.

    Attributes:
        is_torn: whether some of a chunk's gradients were added, and not all.
    """

    def __init__(
        self, parameters: Sequence[Tensor], shares: Shares | None = None
    ) -> None:
        self._parameters, self._shares = parameters, shares
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
                if self._shares is not None:
                    self._shares.see(gradient)
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

    def add(self, gradients: Sequence[Tensor | None], num_rows: int = 0) -> None:
        """Add a chunk's gradients that have not arrived yet; None for a parameter that
        it did not use."""
        totals: list[Tensor] = []
        shares: list[Tensor] = []
        for index, gradient in enumerate(gradients):
            if gradient is None or index in self._arrived:
                continue
            if self._shares is not None:
                self._shares.see(gradient)
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
        if self._shares is not None:
            self._shares.end_chunk(num_rows)

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
        if self._shares is not None:
            self._shares.end(self._sums)
        return [
            None if total is None else total.to(parameter.dtype)
            for total, parameter in zip(self._sums, self._parameters, strict=True)
        ]


def _is_large(parameter: Tensor) -> bool:
    return parameter.numel() >= LARGE and type(parameter) in (Tensor, nn.Parameter)


def _widened(gradient: Tensor) -> Tensor:
    return gradient.float() if gradient.dtype in HALF else gradient


class Pieces:
    """One gradient for each argument: a chunk writes its rows, or adds its share.

    Args:
        arguments: pairs of an argument and how many entries of it belong to a row; 0 if
            every chunk got it whole.
        columns: for each, the dimensions of which a chunk leaves out columns.
    """

    def __init__(
        self,
        arguments: Sequence[tuple[Tensor, int]],
        columns: Sequence[tuple[int, ...]],
    ) -> None:
        self._arguments, self._columns = arguments, columns
        self._shared = Sums([value for value, _ in arguments])
        self._rows: dict[int, Tensor] = {}

    def add(self, chunk: Chunk, gradients: Sequence[Tensor | None]) -> None:
        """Take a chunk's gradients; None for an argument that it did not use."""
        shared: list[Tensor | None] = [None] * len(gradients)
        for index, (value, multiple) in enumerate(self._arguments):
            gradient, columns = gradients[index], self._columns[index]
            if not multiple and gradient is not None and columns:
                own, gradient = gradient, torch.zeros_like(value)
                chunk.part(gradient, 0, 0, columns).copy_(own)
            if not multiple or gradient is None:
                shared[index] = gradient
                continue
            if index not in self._rows:
                self._rows[index] = torch.zeros_like(value)
            chunk.part(self._rows[index], 0, multiple, columns).copy_(gradient)
        self._shared.add(shared)

    def results(self) -> list[Tensor | None]:
        """The gradients of all arguments."""
        shared = self._shared.results()
        return [self._rows.get(index, each) for index, each in enumerate(shared)]
