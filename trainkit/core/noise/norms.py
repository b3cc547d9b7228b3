"""The size of what each micro-batch adds to a window's gradient, seen by hooks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from trainkit.core.gradients import HALF, values_of
from trainkit.core.ranks import Ranks
from trainkit.core.strategies import Weight
from trainkit.core.window import DIVISOR, Window, WindowStats, totals_dtype, vector
from trainkit.errors import TrainkitError

FEW = 2**14
"""Up to so many entries the norm of a tensor is added up in float32. In a row of ten
million, a CPU's rounding grows to a thousandth; longer tensors go row by row."""


class PassNorms:
    """The squared norms of the gradients of single backward passes, seen by hooks.

    A hook on a parameter gets a pass's whole gradient, before it is added to `grad` and
    before DDP averages it over ranks; tied weights are one parameter. It changes
    nothing, and nothing waits for the device.

    Args:
        parameters: those of them that train get a hook, until `stop`.

    Attributes:
        squares: of each pass in the open window: the squared norm over all parameters.
        why_not: why nothing is measured, once that is known.
        parts: of the window that closed last: sum |u_j|^2 and sum w_j^2 on this rank,
            and whether all of it was seen.
    """

    def __init__(self, parameters: Iterable[Tensor] = ()) -> None:
        self.squares: list[Weight] = []
        self.why_not: str | None = None
        self.parts: Tensor | None = None
        self._is_open = False
        self._norms: list[Tensor] = []
        self._small: list[Tensor] = []
        self._seen: set[int] = set()
        self._hooks: list[RemovableHandle] = [
            parameter.register_hook(partial(self.see, index))
            for index, parameter in enumerate(parameters)
            if parameter.requires_grad
        ]

    def stop(self) -> None:
        """Take the hooks away, and forget the window."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self.parts = [], None
        self.rewind(0)

    def begin(self) -> None:
        """A backward pass of the window begins; others, such as those of a gradient
        penalty, are not looked at."""
        self._norms, self._small, self._seen, self._is_open = [], [], set(), True

    def end(self) -> None:
        """The pass has ended."""
        self._is_open = False
        self._norms += [norms_of(gradient.detach()) for gradient in self._small]
        self.squares.append(squared(self._norms))
        self._norms, self._small = [], []

    def rewind(self, num_passes: int) -> None:
        """Return to an earlier place in the window."""
        self._is_open = False
        del self.squares[num_passes:]

    def close(self, window: Window, unit: Tensor) -> None:
        """The window ends; `unit` turns its gradients into sums of w_i g_i."""
        weights = vector(window.applied, unit.device)
        squares = vector(self.squares, unit.device)
        # The beginning of a window that a checkpoint carries was not seen here.
        is_whole = len(squares) == len(window.entries) and window.carried is None
        is_whole = is_whole and not self.why_not
        parts = [squares.sum() * unit**2, weights.square().sum()]
        self.parts = torch.stack([*parts, torch.full_like(unit, is_whole)])

    def row(
        self,
        stats: WindowStats,
        gradients: Sequence[Tensor],
        ranks: Ranks,
        scale: Tensor | float,
    ) -> Tensor:
        """The sums of the window that closed last, over all ranks; zeros if some of it
        was not seen.

        Args:
            stats: the window.
            gradients: the window's, divided.
            ranks: which all must call this.
            scale: what the gradients are still multiplied by.
        """
        assert self.parts is not None
        sum_of_squares, squares_of_weights, whole = ranks.sum_(self.parts)
        weight = stats.totals[DIVISOR]
        total = 1.0 if stats.reduction == "total" else weight
        row = [
            squared_norm(gradients).to(weight) * (total / scale) ** 2,
            sum_of_squares,
            weight.square(),
            squares_of_weights,
            weight,
            stats.samples,
            torch.ones_like(weight),
        ]
        sums = torch.stack(row)
        is_good = (whole == ranks.size) & sums.isfinite().all()
        return torch.where(is_good, sums, 0.0)

    def see(self, index: int, gradient: Tensor) -> None:
        """Take the gradient of a parameter in the pass; it stays as it is."""
        if not self._is_open:
            return
        if index in self._seen:
            self.why_not = (
                "a parameter gets its gradient in several parts of one backward pass "
                "(a reentrant checkpoint around shared weights?), whose sum no hook "
                "sees; use_reentrant=False makes it one"
            )
        self._seen.add(index)
        if gradient.numel() > FEW:
            self._norms.append(norms_of(gradient.detach()))
        else:
            # All at once, in a tenth of the time. As it is held here, and no alias of
            # it, autograd makes a copy of it as `grad`, which DDP writes into.
            self._small.append(gradient)


def norms_of(gradient: Tensor) -> Tensor:
    """A vector whose 2-norm is the gradient's: its norm, or those of its rows."""
    dense = values_of(gradient)
    wide: Any = torch.float32 if dense.dtype in HALF else None
    if dense.numel() <= FEW or dense.ndim < 2:
        return torch.linalg.vector_norm(dense, dtype=wide).reshape(1)
    return torch.linalg.vector_norm(dense.flatten(1), dim=1, dtype=wide)


def squared(norms: Sequence[Tensor]) -> Tensor:
    """The sum of the squares of vectors of norms, in float64."""
    if not norms:
        return torch.zeros((), dtype=torch.float64)
    device = norms[0].device
    alike = [n if n.device == device else n.to(device) for n in norms]
    return torch.cat(alike).to(totals_dtype(device)).square().sum()


def squared_norm(gradients: Iterable[Tensor]) -> Tensor:
    """The squared 2-norm of all gradients together."""
    return squared([norms_of(gradient) for gradient in gradients])


def refuse_shards(parameters: Iterable[Tensor], module: Any = None) -> None:
    """Refuse parameters of which a rank has a part: no hook sees their gradients as a
    micro-batch makes them.

    Args:
        parameters: those that train.
        module: that has them, or Lightning's strategy object, if either is known.
    """
    root = module if isinstance(module, nn.Module) else getattr(module, "model", None)
    modules = root.modules() if isinstance(root, nn.Module) else ()
    wrapper = next(
        (m for m in modules if isinstance(m, FullyShardedDataParallel)), None
    )
    sharded = next((p for p in parameters if isinstance(p, DTensor)), wrapper)
    if sharded is not None:
        raise TrainkitError(
            f"noise scale: parameters must be whole on each rank, and "
            f"{type(sharded).__name__} shards them. Measure it with DDP or on one "
            f"device, or leave it out."
        )
