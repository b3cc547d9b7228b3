"""The two ways to divide the losses of a window by its total weight W.

The first loss of a window decides which one it gets:

- `Told`: W is known. Each loss is multiplied by w / W, and nothing is left to do.
- `Streamed`: W is not known yet. Each loss is multiplied by w / r. When the window
  closes, the sum of the gradients is multiplied by r / W.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from trainkit.core.gradients import HALF
from trainkit.core.ranks import Ranks
from trainkit.core.strategies import (
    LossReduction,
    Strategies,
    Weight,
    checked_weight,
)
from trainkit.core.window_stats import DIVISOR, WEIGHT, scalar, vector
from trainkit.errors import TrainkitError

HEADROOM = 256
"""Under a gradient scaler the first window may weigh up to 256 times the estimate.
Beyond that, half precision overflows and a step is lost."""

UNKNOWN = 1024.0
"""r if the first micro-batch weighs nothing, so that there is no estimate. In half
precision a window may then weigh from a thousandth of it to ten thousand times it."""


class Told:
    """The division of a window whose total is known before its first forward pass.

    The ranks exchange their totals while the first micro-batch computes.

        factor of micro-batch i in term t = multiplier * w_ti / sum_i w_ti

    The multiplier undoes the backend's mean over ranks. A `"sum"` has 1 in place of
    w_ti. A `"total"` is only multiplied by the multiplier.

    Args:
        weights: for each term, the weights of this rank's micro-batches, in order.
        ranks: the ranks that share the window.
        device: where the ranks exchange their totals.
    """

    def __init__(
        self,
        weights: Mapping[str, Sequence[Weight]],
        ranks: Ranks,
        device: torch.device,
    ) -> None:
        self._weights = {t: [_on_host(w) for w in row] for t, row in weights.items()}
        self._first = next(iter(self._weights))
        self.multiplier = ranks.multiplier
        self._totals: dict[str, Weight] | None = None
        self._most: int | None = None
        self.num_micro_batches = len(self._weights[self._first])
        self.num_begun = 0
        own = {t: _sum(row, device) for t, row in self._weights.items()}
        if ranks.size == 1:
            self._totals, self._most = own, self.num_micro_batches
            return
        row = vector([*own.values(), self.num_micro_batches], device)
        self._shared = ranks.gather_rows(row)

    def next_weights(self) -> dict[str, Weight]:
        """Return the weights of the next micro-batch, by term."""
        index, self.num_begun = self.num_begun, self.num_begun + 1
        if index >= self.num_micro_batches:
            raise TrainkitError(
                f"expect(): the window was to have {self.num_micro_batches} "
                f"micro-batches on this rank, and another one came. Pass expect() all "
                f"of the window's micro-batches, or call finish() before the next one."
            )
        return {term: row[index] for term, row in self._weights.items()}

    def factor(
        self, weight: Weight, reduction: LossReduction, *, divided_by: int
    ) -> Weight:
        """Return what to multiply the gradient of a micro-batch's loss by.

        Args:
            weight: the micro-batch's.
            reduction: how the loss was reduced: mean, sum or total.
            divided_by: what the loop has divided the loss by.
        """
        factor = self.factor_of_term(self._first, weight, reduction)
        return factor if divided_by == 1 else factor * divided_by

    def factor_of_term(
        self, term: str, weight: Weight, reduction: LossReduction
    ) -> Weight:
        """Return what to multiply the gradient of one term of a loss by."""
        return self.fraction(term, weight, reduction) * self.multiplier

    def fraction(self, term: str, weight: Weight, reduction: LossReduction) -> Weight:
        """A micro-batch's share of the term's loss over the window."""
        if reduction == "total":
            return 1.0
        return quotient(weight if reduction == "mean" else 1, self.totals[term])

    @property
    def totals(self) -> dict[str, Weight]:
        """The window's total weight in each term, over all ranks."""
        if self._totals is None:
            table = self._shared.wait()
            self._totals = dict(zip(self._weights, table.sum(0).unbind(), strict=False))
        return self._totals

    def most_micro_batches(self) -> int:
        """The largest number of micro-batches on one rank; waits for the device."""
        if self._most is None:
            self._most = int(self._shared.wait()[:, -1].amax())
        return self._most

    def refuse_unfinished(self) -> None:
        if self.num_begun != self.num_micro_batches:
            raise TrainkitError(
                f"finish(): the window was to have {self.num_micro_batches} "
                f"micro-batches on this rank, by expect(), and had {self.num_begun}: "
                f"its gradient would be too small. Run all of them, or drop() the "
                f"window."
            )

    def close(self, totals: Tensor, reduction: LossReduction, window: int) -> None:
        """Do nothing: each gradient has been divided already."""


class Streamed:
    """The division of windows whose total is known only when they close.

    r is one number that all ranks share, close to the weight of a window on one rank.
    So the sum of the gradients w_i / r has about the size of a mean gradient, whatever
    the weights are, and half precision neither overflows nor underflows. r is a power
    of two: if w is exact, w / r is too.

    A gradient scaler that serves several optimizers changes its factor when one of them
    steps, perhaps inside another's window. Each gradient is converted to the factor
    with which its window was opened. Nothing here waits for the device.

    Args:
        ranks: the ranks that must agree on r.
        leaves_room: whether an overflow costs a step, so that r leaves headroom.
        scaler: the loop's gradient scaler, or None.

    Attributes:
        reference: r; None before the first window.
        opening: the scaler's factor when the open window was opened; None means 1.
    """

    def __init__(self, ranks: Ranks, *, leaves_room: bool, scaler: Any) -> None:
        self._ranks = ranks
        self._headroom = HEADROOM if leaves_room else 1
        self._scaler = scaler
        self._inverses: dict[int, Tensor] = {}
        self.reference: Tensor | None = None
        self.opening: Tensor | None = None

    @property
    def has_scaler(self) -> bool:
        """Whether there is a gradient scaler that scales."""
        return self._scaler is not None and self._scaler.is_enabled()

    def restore(self, reference: Tensor | None, opening: Tensor | None) -> None:
        """Set `reference` and `opening` to the values in a checkpoint."""
        self._set(reference)
        self.opening = opening

    def agree(self, weight: Weight, expected: int, device: torch.device) -> None:
        """Choose r for the first window, from the ranks' first micro-batches.

        Later windows take it from an earlier window's weight, which all ranks know. If
        backward passes communicate, every rank calls this in its first one.
        """
        if self.reference is not None:
            return
        first = scalar(weight, device) * (expected * self._headroom)
        if self._ranks.backend_sums:
            first = self._ranks.sum_(first) / self._ranks.size
        self._set(power_of_two(first, None))

    def open(self, device: torch.device) -> None:
        """Begin a window with the scaler's present factor."""
        self.opening = self.factor_now(device)

    def factor(
        self,
        loss: Tensor,
        weight: Weight,
        reduction: LossReduction,
        *,
        divided_by: int,
        expected: int,
    ) -> tuple[Tensor, Weight]:
        """Return w / r, and the weight as the dtype of the loss has rounded it.

        Args:
            loss: where the backward pass starts.
            weight: the micro-batch's.
            reduction: how the loss was reduced: mean, sum or total.
            divided_by: what the loop has divided the loss by.
            expected: how many micro-batches the first window will have on this rank.
        """
        self.agree(weight, expected, loss.device)
        inverse = self._inverse(divided_by)
        by_mean = reduction == "mean"
        factor = inverse * weight if by_mean else inverse
        applied = weight
        if by_mean and loss.dtype in HALF:
            applied = factor.to(loss.dtype) / inverse
        to_opening = self._to_opening(loss.device)
        return factor if to_opening is None else factor * to_opening, applied

    def close(
        self, totals: Tensor, reduction: LossReduction, window: int
    ) -> Tensor | None:
        """Return r / W, which multiplies the window's gradients; None if it has none.

        Args:
            totals: the window's, over all ranks.
            reduction: how the losses were reduced: mean, sum or total.
            window: how many windows were closed before this one.
        """
        scale = self._scale(totals, reduction)
        # r need not follow every window, but all ranks must change it together.
        if window < 8 or window % 16 == 0:
            self._set(power_of_two(totals[WEIGHT] / self._ranks.size, self.reference))
        return scale

    def _scale(self, totals: Tensor, reduction: LossReduction) -> Tensor | None:
        if self.reference is None:
            return None
        scale = self.reference.to(totals.device)
        if reduction != "total":
            scale = scale / totals[DIVISOR]
        if self._ranks.multiplier != 1:
            scale = scale * self._ranks.multiplier
        to_opening = self._to_opening(totals.device)
        if to_opening is not None:
            scale = scale / to_opening  # back to the scaler's present factor
        # 0 if the window weighs nothing: 0 / 0 must not reach a gradient.
        return scale.nan_to_num_(0.0, 0.0, 0.0)

    def _set(self, reference: Tensor | None) -> None:
        self.reference = reference
        self._inverses = {}

    def _inverse(self, divided_by: int) -> Tensor:
        if divided_by not in self._inverses:
            assert self.reference is not None
            self._inverses[divided_by] = divided_by / self.reference
        return self._inverses[divided_by]

    def _to_opening(self, device: torch.device) -> Tensor | None:
        """The factor that converts a gradient from the scaler's present factor to the
        one at the window's opening; None means 1."""
        now = self.factor_now(device)
        if now is None and self.opening is None:
            return None
        opening = 1.0 if self.opening is None else self.opening.to(device)
        return opening / (torch.ones((), device=device) if now is None else now)

    def factor_now(self, device: torch.device) -> Tensor | None:
        """The scaler's present factor; None means 1."""
        if not self.has_scaler:
            return None
        return self._scaler.scale(torch.ones((), device=device))


def unit_of(
    division: Told | Streamed,
    streamed: Streamed,
    totals: Tensor,
    reduction: LossReduction,
) -> Tensor:
    """What turns the gradient of a pass, as a hook on a parameter sees it, into what
    its micro-batch adds to the window's sum of w_i g_i.

    Args:
        division: of the window, which is not closed yet.
        streamed: has the gradient scaler, if there is one.
        totals: the window's, over all ranks.
        reduction: how the losses were reduced: mean, sum or total.
    """
    factor = streamed.opening
    if isinstance(division, Told):
        factor = streamed.factor_now(totals.device)
        whole = torch.ones_like(totals[WEIGHT])
        whole = whole if reduction == "total" else totals[WEIGHT]
        whole = whole / division.multiplier
    else:
        assert division.reference is not None
        whole = division.reference.to(totals)
    return whole if factor is None else whole / factor.to(totals)


def power_of_two(number: Tensor, before: Tensor | None) -> Tensor:
    """The power of two nearest to a positive number; otherwise the one before.

    It falls by at most a half: after an epoch's short last window comes a full one.
    """
    nearest = number.log2().round().exp2()
    if before is None:
        return torch.where(nearest > 0, nearest, UNKNOWN)
    before = before.to(number.device)
    return torch.where(nearest > 0, nearest.maximum(before / 2), before)


def weights_by_term(
    strategies: Strategies, batches: Iterable[object]
) -> dict[str, list[Weight]]:
    """The weights of micro-batches in each term."""
    listed = list(batches)
    if not listed:
        raise TrainkitError(
            "expect(): received no micro-batches, so the window's total is not known. "
            "Pass all that this rank will run. A rank without any runs one of weight 0."
        )
    return {
        term: [_on_host(strategy.weight(batch)) for batch in listed]
        for term, strategy in strategies.items()
    }


def quotient(part: Weight, total: Weight) -> Weight:
    """part / total, or 0 if the total is 0."""
    if isinstance(total, Tensor):
        return torch.where(total == 0, 0, part / total)
    if isinstance(part, Tensor):
        return part / total if total else part * 0
    return part / total if total else 0.0


def _on_host(weight: Weight) -> Weight:
    """A weight as a plain number, if that needs no waiting for a GPU."""
    if isinstance(weight, Tensor) and weight.is_cpu and weight.numel() == 1:
        weight = weight.item()
    return checked_weight(weight)


def _sum(weights: Sequence[Weight], device: torch.device) -> Weight:
    if any(isinstance(weight, Tensor) for weight in weights):
        return vector(weights, device).sum()
    return math.fsum(cast(Sequence[float], weights))
