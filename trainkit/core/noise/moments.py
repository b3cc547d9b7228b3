"""The noise scale of a training, measured in its own windows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from trainkit.core.accumulator import Accumulator
from trainkit.core.gradients import HALF, gradients_of, parameters_of, values_of
from trainkit.core.noise.estimate import COLUMNS, NoiseEstimate
from trainkit.core.ranks import Ranks
from trainkit.core.strategies import Weight
from trainkit.core.window import DIVISOR, Window, WindowStats, totals_dtype, vector
from trainkit.errors import TrainkitError

FEW = 2**14
"""Up to so many entries the norm of a tensor is added up in float32. In a row of ten
million, a CPU's rounding grows to a thousandth; longer tensors go row by row."""
LAST = 160
"""The estimate is over at most so many measured windows."""


class NoiseMoments:
    """Sums over measured windows, from which the gradient noise scale is estimated.

        noise = NoiseMoments(accumulator, optimizer)
        for micro_batches in windows:
            noise.watch()
            for batch in micro_batches:
                accumulator.backward(loss_of(batch), batch)
            stats = accumulator.finish(optimizer)
            noise.add(stats, samples=64)
            optimizer.step()
        print(noise.estimate())

    A window that is not watched costs nothing; there is no need to watch all. A hook on
    a parameter gets a pass's whole gradient, before it is added to `grad` and before
    DDP averages it over ranks; tied weights are one parameter. Hooks change nothing,
    and norms stay on the device. On several ranks each measured window needs one small
    sum over ranks. A window in which a parameter gets its gradient in several parts of
    one pass is not seen: around shared weights, checkpoint with `use_reentrant=False`.

    Args:
        accumulator: of the windows.
        optimizer_or_parameters: what trains.

    Attributes:
        table: the sums of the last 160 windows that were added, as `COLUMNS` names
            them, on their device; zeros for one of which some was not seen.

    Raises:
        TrainkitError: the loss has several terms, or a rank has parts of parameters.
    """

    def __init__(self, accumulator: Accumulator, optimizer_or_parameters: Any) -> None:
        if len(accumulator.strategies) > 1:
            raise TrainkitError(
                f"noise scale: a micro-batch must have one weight, and the terms "
                f"{list(accumulator.strategies)} of the loss have one each. Leave it "
                f"out, or give the loss one strategy."
            )
        is_optimizer = hasattr(optimizer_or_parameters, "param_groups")
        found = parameters_of(optimizer_or_parameters)
        _refuse_shards(found, accumulator.ranks)
        # Finetuning may add some to an optimizer; a generator is used up now.
        self._source = optimizer_or_parameters if is_optimizer else found
        self._accumulator = accumulator
        self.table: Tensor = torch.zeros(0, len(COLUMNS))
        self._hooks: list[RemovableHandle] = []
        self._forget()

    def _forget(self) -> None:
        self._parts: Tensor | None = None  # of the window, once it has closed
        self._squares: list[Weight] = []  # of each of its passes
        self._norms: dict[int, Tensor] | None = None  # in the pass under way

    # ---- a window --------------------------------------------------------------------

    @property
    def is_watching(self) -> bool:
        """Whether the open window is measured."""
        return self._accumulator.gradients.norms is self

    @property
    def is_finished(self) -> bool:
        """Whether a watched window has been finished, and can be added."""
        return self.is_watching and self._parts is not None

    def watch(self) -> None:
        """Measure the window that begins now."""
        self.stop()
        parameters = parameters_of(self._source)
        _refuse_shards(parameters, self._accumulator.ranks)
        self._hooks = [
            parameter.register_hook(partial(self._see, index))
            for index, parameter in enumerate(parameters)
            if parameter.requires_grad
        ]
        self._accumulator.gradients.norms = self

    def stop(self) -> None:
        """Take all hooks away, and forget the window."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._forget()
        if self.is_watching:
            self._accumulator.gradients.norms = None

    def add(
        self,
        stats: WindowStats,
        *,
        samples: float | None = None,
        scale: Tensor | float = 1.0,
    ) -> None:
        """Add the window that was watched and has been finished.

        Every rank must call it, before its gradients are clipped.

        Args:
            stats: what `finish` returned.
            samples: how many samples it had on all ranks; not needed where they were
                counted in `stats`.
            scale: what a gradient scaler has multiplied the gradients by, if they are
                not unscaled yet.
        """
        if self._parts is None or not self.is_watching:
            raise TrainkitError(
                "NoiseMoments.add(): the window must be watched and finished, and "
                f"{'was not finished' if self.is_watching else 'was not watched'}. "
                f"Call watch() before its first backward pass, then finish()."
            )
        ranks = self._accumulator.ranks
        sum_of_squares, squares_of_weights, whole = ranks.sum_(self._parts)
        weight = stats.totals[DIVISOR]
        total = 1.0 if stats.reduction == "total" else weight
        gradients = gradients_of(parameters_of(self._source))
        row = [
            squared_norm(gradients).to(weight) * (total / scale) ** 2,
            sum_of_squares,
            weight.square(),
            squares_of_weights,
            weight,
            stats.samples if samples is None else torch.full_like(weight, samples),
            torch.ones_like(weight),
        ]
        sums = torch.stack(row)
        is_good = (whole == ranks.size) & sums.isfinite().all()
        sums = torch.where(is_good, sums, 0.0)
        self.stop()
        self.table = torch.cat([self.table.to(sums), sums[None]])[-LAST:]

    # ---- called by the accumulator, in the watched window ----------------------------

    def begin(self) -> None:
        """A backward pass of the window begins; others, such as those of a gradient
        penalty, are not looked at."""
        self._norms = {}

    def end(self) -> None:
        """The pass has ended."""
        found, self._norms = self._norms or {}, None
        self._squares.append(_squared([*found.values()]) if found else math.nan)

    def forget(self) -> None:
        """Forget the window's passes."""
        self._norms = None
        self._squares.clear()

    def close(self, window: Window, unit: Tensor) -> None:
        """The window ends; `unit` turns its gradients into sums of w_i g_i."""
        weights = vector(window.applied, unit.device)
        squares = vector(self._squares, unit.device)
        # The beginning of a window that a checkpoint carries was not seen here.
        is_whole = len(squares) == len(window.entries) and window.carried is None
        parts = [squares.sum() * unit**2, weights.square().sum()]
        self._parts = torch.stack([*parts, torch.full_like(unit, is_whole)])

    def _see(self, index: int, gradient: Tensor) -> None:
        """Take the gradient of a parameter in the pass; it stays as it is."""
        if self._norms is None:
            return
        norms = _norms_of(gradient.detach())
        is_first = index not in self._norms  # of the sum of several parts no hook knows
        self._norms[index] = norms if is_first else norms * math.nan

    # ---- the estimate ----------------------------------------------------------------

    def estimate(self) -> NoiseEstimate | None:
        """The estimate so far; waits for the device.

        None before five windows were measured, if each was one micro-batch on one
        rank, or if nobody has counted samples.
        """
        return NoiseEstimate.of(self.table.tolist())

    def state_dict(self) -> dict[str, Any]:
        """The sums, for a checkpoint; waits for the device. A window that is open is
        not measured."""
        return {"table": self.table.cpu()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume what `state_dict` has saved."""
        self.table = state["table"].to(self._accumulator.device)


def squared_norm(gradients: Iterable[Tensor]) -> Tensor:
    """The squared 2-norm of all gradients together, in float64."""
    return _squared([_norms_of(gradient) for gradient in gradients])


def _norms_of(gradient: Tensor) -> Tensor:
    """A vector whose 2-norm is the gradient's: its norm, or those of its rows."""
    dense = values_of(gradient)
    wide: Any = torch.float32 if dense.dtype in HALF else None
    if dense.numel() <= FEW or dense.ndim < 2:
        return torch.linalg.vector_norm(dense, dtype=wide).reshape(1)
    return torch.linalg.vector_norm(dense.flatten(1), dim=1, dtype=wide)


def _squared(norms: Sequence[Tensor]) -> Tensor:
    if not norms:
        return torch.zeros((), dtype=torch.float64)
    device = norms[0].device
    alike = [n if n.device == device else n.to(device) for n in norms]
    return torch.cat(alike).to(totals_dtype(device)).square().sum()


def _refuse_shards(parameters: Iterable[Tensor], ranks: Ranks) -> None:
    """Refuse parameters of which a rank has a part: no hook sees their gradients as a
    micro-batch makes them."""
    is_sharded = any(isinstance(parameter, DTensor) for parameter in parameters)
    if is_sharded or (ranks.backend_sums and ranks.ddp is None):
        raise TrainkitError(
            "noise scale: parameters must be whole on each rank, and a backend other "
            "than DDP may shard them. Measure it with DDP or on one device, or leave "
            "it out."
        )
