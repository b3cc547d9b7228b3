"""The division of a window's losses by its total weight W, told or summed up."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from trainkit.core.gradients import HALF
from trainkit.core.plan.options import check_kind
from trainkit.core.ranks import Ranks
from trainkit.core.strategies import (
    LossReduction,
    Strategies,
    Weight,
    checked_weight,
)
from trainkit.core.window import (
    DIVISOR,
    WEIGHT,
    Window,
    default_device,
    read,
    scalar,
    vector,
)
from trainkit.errors import TrainkitError

HEADROOM = 256
"""Under a gradient scaler the first window may weigh up to 256 times the estimate.
Beyond that, half precision overflows and a step is lost."""

UNKNOWN = 1024.0
"""r if the first micro-batch weighs nothing, so that there is no estimate. In half
precision a window may then weigh from a thousandth of it to ten thousand times it."""


class Division:
    """Divides by W in two steps, of which the second may have nothing left to do.

        gradient of micro-batch i      *=  w_i / r       as it comes
        sum of the window's gradients  *=  r * m / W     when the window closes

    m undoes the backend's mean over ranks. A loss that is a sum has 1 in place of w_i,
    and one that stays a sum (a `"total"`) has 1 in place of W too.

    If the window was announced beforehand, r = W / m. Otherwise r is one number that
    all ranks share, close to the weight of a window on one rank: the sum of w_i g_i / r
    has about the size of a mean gradient, whatever the weights are, and half precision
    neither overflows nor underflows. It is a power of two: if w is exact, w / r is too.
    It is a plain number where one process weighs by plain numbers, and a tensor else.
    A loss in half precision would round w / W, so its window is divided in two steps.

    A gradient scaler that serves several optimizers changes its factor when one of them
    steps, perhaps inside another's window. Each gradient is converted to the factor
    with which its window was opened. Nothing here waits for the device.

    Args:
        ranks: the ranks that must agree on r.
        scaler: the loop's gradient scaler, or None. With one an overflow costs a step,
            so the first r leaves headroom.

    Attributes:
        has_scaler: whether there is a gradient scaler that scales.
        reference: r of windows that are not told; None before the first of them.
        opening: the scaler's factor when the open window was opened; None means 1.
        is_open: whether a window has begun.
        device: where the newest losses were; None before the first.
    """

    def __init__(self, ranks: Ranks, scaler: Any) -> None:
        kinds = (torch.amp.GradScaler, type(None))
        check_kind("Accumulator scaler", scaler, kinds, "a torch.amp.GradScaler")
        self._ranks, self._scaler = ranks, scaler
        self.has_scaler: bool = scaler is not None and scaler.is_enabled()
        self._may_be_plain = ranks.size == 1 and not self.has_scaler
        self.reference: Weight | None = None
        self.opening: Tensor | None = None
        self.is_open = False
        self.device: torch.device | None = None
        self._told: Weight | None = None
        self._factors: dict[Any, Weight] = {}

    def restore(self, reference: Tensor | None, opening: Tensor | None) -> None:
        """Set `reference` and `opening` to the values in a checkpoint."""
        self.reference = reference
        if reference is not None and self._may_be_plain:
            self.reference = reference.item()
        self.opening = opening

    def agree(self, weight: Weight, expected: int, device: torch.device) -> None:
        """Choose r for the first window, from the ranks' first micro-batches, if that
        is not done yet.

        Later windows take it from an earlier window's weight, which all ranks know. If
        backward passes communicate, every rank calls this in its first one.

        Args:
            weight: of this rank's first micro-batch.
            expected: how many micro-batches the window will have on this rank.
            device: where the ranks agree.
        """
        if self.reference is not None:
            return
        headroom = 1 if self._scaler is None else HEADROOM
        first = weight * (expected * headroom)
        if isinstance(first, Tensor) or not self._may_be_plain:
            first = scalar(first, device)
            if self._ranks.backend_sums:
                first = self._ranks.sum_(first) / self._ranks.size
        self.reference = power_of_two(first, None)

    def begin_apart(self) -> None:
        """Choose r of the first window now, so that no rank waits there for one that
        has no micro-batch yet."""
        self.reference = scalar(UNKNOWN, default_device())

    def open(
        self, told: Told | None, reduction: LossReduction, device: torch.device
    ) -> None:
        """Begin a window with the scaler's present factor.

        Args:
            told: knows W, if the window is to be divided as it comes.
            reduction: how the losses are reduced: mean, sum or total.
            device: where they are.
        """
        self.opening = self._factor_now(device) if self.has_scaler else None
        self.is_open = True
        if isinstance(self.reference, Tensor):
            self.reference = self.reference.to(device)
        if told is not None:
            total = 1 if reduction == "total" else told.totals[told.leading]
            self._told = _or_infinite(total) / self._ranks.multiplier

    def close(self) -> None:
        """Forget the open window."""
        self.opening = self._told = None
        self.is_open = False
        self._factors = {}

    def factor(
        self, loss: Tensor, weight: Weight, reduction: LossReduction, divided_by: int
    ) -> tuple[Weight, Weight]:
        """What multiplies a micro-batch's gradient, and the weight that is in it once
        the dtype of the loss has rounded it.

        Args:
            loss: where the backward pass starts.
            weight: the micro-batch's.
            reduction: how the loss was reduced: mean, sum or total.
            divided_by: what the loop has divided the loss by.
        """
        whole, by_mean = self._told, reduction == "mean"
        if whole is None:
            whole = self.reference
        assert whole is not None
        part = weight * divided_by if by_mean else divided_by
        if not isinstance(part, Tensor) and not isinstance(whole, Tensor):
            factor = part / whole
        else:
            factor = self._quotient(part, whole, loss)
        applied = weight
        if by_mean and self._told is None and loss.dtype in HALF:
            factor = _rounded(factor, loss.dtype)
            applied = factor * whole / divided_by
        if self.opening is not None or self.has_scaler:
            factor = factor * self._to_opening(loss.device)
        if isinstance(factor, Tensor):
            factor = factor.to(loss.device, loss.dtype)
        return factor, applied

    def _quotient(self, part: Weight, whole: Weight, loss: Tensor) -> Weight:
        """part / whole as a tensor that can multiply a gradient; of equal plain parts
        it is made once in a window, in which the whole stays what it is."""
        key = None if isinstance(part, Tensor) else (part, loss.device, loss.dtype)
        found = self._factors.get(key)
        if found is None:
            dtype = torch.float32 if loss.dtype in HALF else loss.dtype
            quotient: Any = part / whole
            found = quotient.to(loss.device, dtype)
            if key is not None:
                self._factors[key] = found
        return found

    def scale(self, window: Window, totals: Tensor, num_windows: int) -> Weight | None:
        """What multiplies the window's gradients, now that it closes; None is 1.

        Args:
            window: that closes.
            totals: its columns, over all ranks.
            num_windows: how many windows were closed before this one.
        """
        if self._told is not None:
            return None
        before = self.reference
        known = window.known_sums if self._may_be_plain else None
        weight, divisor = known or (totals[WEIGHT], totals[DIVISOR])
        # r need not follow every window, but all ranks must change it together.
        if num_windows < 8 or num_windows % 16 == 0:
            self.reference = power_of_two(weight / self._ranks.size, before)
        if before is None:
            return None  # this rank has had no micro-batch yet
        if isinstance(before, Tensor):  # losses may be on several devices
            before = before.to(totals.device)
        if window.reduction == "total":
            divisor = 1
        elif not isinstance(divisor, Tensor) and not 0 < divisor < math.inf:
            divisor = math.inf  # 0 comes of it below, as of a tensor
        scale = before / divisor
        if self._ranks.multiplier > 1:
            scale = scale * self._ranks.multiplier
        if self.has_scaler or self.opening is not None:
            # Back to the scaler's present factor.
            scale = scale / self._to_opening(totals.device)
        # 0 if the window weighs nothing: 0 / 0 must not reach a gradient.
        return scale.nan_to_num(0.0, 0.0, 0.0) if isinstance(scale, Tensor) else scale

    def unit(self, device: torch.device) -> Tensor:
        """What turns the gradient of a pass, as a hook on a parameter sees it, into
        what its micro-batch adds to the window's sum of w_i g_i."""
        whole = self.reference if self._told is None else self._told
        assert whole is not None
        unit = scalar(whole, device)
        return unit if self.opening is None else unit / self.opening.to(unit)

    def _to_opening(self, device: torch.device) -> Tensor:
        """The factor that converts a gradient from the scaler's present factor to the
        one at the window's opening."""
        opening = 1.0 if self.opening is None else self.opening.to(device)
        return opening / self._factor_now(device)

    def _factor_now(self, device: torch.device) -> Tensor:
        """The scaler's present factor."""
        one = torch.ones((), device=device)
        return self._scaler.scale(one) if self.has_scaler else one


def _or_infinite(total: Weight) -> Weight:
    """Infinity in place of 0, so that nothing is divided by 0."""
    if isinstance(total, Tensor):
        return torch.where(total == 0, math.inf, total)
    return total or math.inf


def power_of_two(number: Weight, before: Weight | None) -> Weight:
    """The power of two nearest to a positive number; otherwise the one before.

    It falls by at most a half: after an epoch's short last window comes a full one.
    """
    otherwise = UNKNOWN if before is None else before
    least = 0.0 if before is None else before / 2
    if not isinstance(number, Tensor) and not isinstance(least, Tensor):
        if not 0 < number < math.inf:
            return otherwise
        return max(2.0 ** round(math.log2(number)), least)
    numbers = number, least, otherwise
    device = next(each.device for each in numbers if isinstance(each, Tensor))
    number, least, otherwise = (scalar(each, device) for each in numbers)
    nearest = number.log2().round().exp2()
    return torch.where(nearest > 0, nearest.maximum(least), otherwise)


def _rounded(number: Weight, dtype: torch.dtype) -> Weight:
    """A number as half precision has it, in its own type, so that its product with
    another is not rounded too."""
    if isinstance(number, Tensor):
        return number.to(dtype).to(number.dtype)
    rounded: Any = torch.tensor(number, dtype=dtype).tolist()
    return rounded


# ---- windows whose total is known before their first forward pass --------------------


class Told:
    """What a window's micro-batches weigh, announced by each rank beforehand.

    The ranks exchange their totals while the first micro-batch computes.

    Args:
        weights: for each term, the weights of this rank's micro-batches, in order, as
            `weights_by_term` has them.
        ranks: the ranks that share the window.
        device: where the ranks exchange their totals.

    Attributes:
        leading: the name of the first term.
    """

    def __init__(
        self,
        weights: Mapping[str, Sequence[Weight]],
        ranks: Ranks,
        device: torch.device,
    ) -> None:
        self._weights = weights
        self.leading = next(iter(weights))
        self.num_micro_batches = len(weights[self.leading])
        self._is_whole = ranks.size == 1 and self.num_micro_batches == 1
        self.num_begun = 0
        own = {term: _sum(column, device) for term, column in weights.items()}
        self._totals: dict[str, Weight] | None = own
        if ranks.size > 1:
            self._totals = None
            self._table, self._work = ranks.send_row(vector([*own.values()], device))

    def suits(self, loss: Tensor, window: Window) -> bool:
        """Whether the dtype of a loss has w / W: half precision would round it, unless
        it is 1."""
        is_one = self._is_whole and window.reduction != "sum"
        return is_one or loss.dtype not in HALF

    def next_weights(self) -> dict[str, Weight]:
        """Return the weights of the next micro-batch, by term."""
        index, self.num_begun = self.num_begun, self.num_begun + 1
        if index >= self.num_micro_batches:
            raise TrainkitError(
                f"expect(): the window was to have {self.num_micro_batches} "
                f"micro-batches on this rank, and another one came. Pass expect() all "
                f"of the window's micro-batches, or call finish() before the next one."
            )
        return {term: column[index] for term, column in self._weights.items()}

    @property
    def totals(self) -> Mapping[str, Weight]:
        """The window's total weight in each term, over all ranks."""
        if self._totals is None:
            self._work.wait()
            totals = self._table.sum(0).unbind()
            self._totals = dict(zip(self._weights, totals, strict=True))
        return self._totals

    def refuse_unfinished(self) -> None:
        if self.num_begun != self.num_micro_batches:
            raise TrainkitError(
                f"finish(): the window was to have {self.num_micro_batches} "
                f"micro-batches on this rank, by expect(), and had {self.num_begun}: "
                f"its gradient would be too small. Run all of them, or drop() the "
                f"window."
            )


def weights_by_term(
    strategies: Strategies, batches: Iterable[object]
) -> dict[str, list[Weight]]:
    """The checked weights of micro-batches in each term; those that are in the host's
    memory are plain numbers."""
    listed = list(batches)
    if not listed:
        raise TrainkitError(
            "expect(): received no micro-batches, so the window's total is not known. "
            "Pass all that this rank will run. A rank without any runs one of weight 0."
        )
    return {
        term: [checked_weight(read(strategy.weight(batch))) for batch in listed]
        for term, strategy in strategies.items()
    }


def _sum(weights: Sequence[Weight], device: torch.device) -> Weight:
    for weight in weights:
        if isinstance(weight, Tensor):
            return vector(weights, device).sum()
    return math.fsum(cast(Sequence[float], weights))
