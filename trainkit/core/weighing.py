"""What the backward passes of an open window are multiplied by."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.core import refusals
from trainkit.core.expected import Expected, weights_by_term
from trainkit.core.gradients import HALF, leaves_of
from trainkit.core.late_reading import LateReading
from trainkit.core.left import Left
from trainkit.core.ranks import Ranks
from trainkit.core.reference import Reference
from trainkit.core.scaler import ScalerFactor
from trainkit.core.strategies import (
    AccumulationStrategy,
    LossReduction,
    Weight,
    checked_weight,
)
from trainkit.core.terms import join, leading, named_strategies
from trainkit.core.totals import default_device
from trainkit.core.wide_gradients import WideGradients
from trainkit.core.window import Window
from trainkit.core.window_stats import COUNT


class Weighing:
    """The open window of an `Accumulator`: weights each loss, and counts it.

    Args:
        strategy: says what a micro-batch weighs, or a mapping of several.
        module: what trains.
        ranks: those that share the window.
        nonfinite: what becomes of a loss that is NaN or infinite.
        scaler: the gradient scaler, if there is one.

    Attributes:
        wide: keeps the window's gradient in float32, where that was asked for.
    """

    def __init__(
        self,
        strategy: AccumulationStrategy | Mapping[str, AccumulationStrategy],
        *,
        module: Any,
        ranks: Ranks,
        nonfinite: str,
        scaler: Any,
    ) -> None:
        self.strategies = named_strategies(strategy)
        self.strategy = leading(self.strategies)
        self.ranks = ranks
        self.parameters: list[Tensor] = []
        if isinstance(module, nn.Module):
            self.parameters = [p for p in module.parameters() if p.requires_grad]
        self._module = module
        self._nonfinite = nonfinite
        self._window = Window()
        self._reference = Reference(ranks, has_scaler=nonfinite == "allow")
        self._factor = ScalerFactor(scaler)
        self._zeroed: deque[tuple[int, LateReading]] = deque()
        self._has_said_zeroed = False
        self._is_first, self._is_written = True, False
        self.wide: WideGradients | None = None

    def keep_wide(self, training: Callable[[], Iterable[Tensor]]) -> None:
        """From here on keep the window's gradient in float32, and round it once.

        Args:
            training: says which parameters train; asked after each backward pass,
                since finetuning lets more of them join.
        """
        self._training = training
        self.wide = WideGradients(training(), ranks=self.ranks)

    @property
    def num_micro_batches(self) -> int:
        """How many micro-batches the open window holds, a checkpoint's included."""
        carried = self._window.carried
        before = 0 if carried is None else int(carried[COUNT])
        return before + len(self._window.losses)

    @property
    def most_micro_batches(self) -> int | None:
        """Of the rank that has the most in the open window; waits for the device. None
        where `expect` has not told it."""
        expected = self._window.expected
        return None if expected is None else expected.most_micro_batches()

    @property
    def is_open(self) -> bool:
        """Whether gradients are waiting to be divided."""
        return self._window.is_open

    def weigh(
        self,
        loss: Tensor,
        weight: Weight,
        *,
        divided_by: int = 1,
        value: Tensor | None = None,
        expected: int = 1,
    ) -> Any:
        """Weight the backward pass that is about to run on `loss`, and count it.

        For a loop that runs backward passes by itself; `backward` is this and the pass.

        Args:
            loss: what the pass starts from.
            weight: what the micro-batch weighs.
            divided_by: what the loop has divided the loss by.
            value: the loss to report, divided alike, where that is not `loss` (a
                scaler's factor); nobody may write over it.
            expected: how many micro-batches the window will have on this rank; only
                for the size of the sums while it is open.

        Returns:
            A handle whose `remove()` takes the weighting off again.
        """
        refusals.refuse_backward(self._window, self.ranks, self._reduction, loss)
        self._look_at_left()
        window = self._window
        if not self.parameters:
            self.parameters = leaves_of(loss)
        if not window.num_weighted and window.carried is None:
            self._factor.open(loss.device)
        if value is None:
            # clone: the next step of a CUDA graph writes over this one's loss
            value = loss.detach().clone()
        applied = weight = checked_weight(weight)
        factor: Weight | None = None
        if window.joined is not None:  # its terms have factors of their own
            value, divided_by = window.joined.value, 1
            window.joined = None
        elif self._is_told(loss.dtype):
            assert window.expected is not None
            factor = window.expected.factor(self._first, weight, self._reduction)
            factor = factor * divided_by
        else:
            factor, applied = self._streamed(loss, weight, divided_by, expected)
        if isinstance(factor, Tensor):
            factor = factor.to(loss.device, loss.dtype)
        window.add(weight, applied, value, divided_by)
        if isinstance(self._module, nn.Module):  # Lightning sees to it itself
            window.is_apart = self.ranks.holds_back_gradients

        def weighted(gradient: Tensor) -> Tensor:
            window.num_passes += 1
            return gradient if factor is None else factor * gradient

        return loss.register_hook(weighted)

    def weigh_in_turn(
        self, loss: Tensor, weight: Weight, value: Tensor, *, as_seed: bool = False
    ) -> Tensor | None:
        """`weigh`, for the loop that `take` has given this loss: nothing is looked at
        that such a loop cannot do wrong.

        Args:
            loss: what the pass starts from.
            weight: what the micro-batch weighs.
            value: the loss to report.
            as_seed: the loop can start the pass from another gradient than 1.

        Returns:
            That gradient, if so; else the loss has a hook that multiplies it.
        """
        window = self._window
        if window.joined is not None or not self._is_told(loss.dtype):
            self.weigh(loss, weight, value=value)
            return None
        self._look_at_left()
        if not loss.requires_grad:
            refusals.refuse_loss(loss, self._reduction)
        assert window.expected is not None
        factor = window.expected.factor(self._first, weight, self._reduction)
        window.add(weight, weight, value, 1)
        if as_seed:
            window.num_passes += 1
            if isinstance(factor, Tensor):
                return factor.to(loss.device, loss.dtype).view_as(loss)
            return torch.full_like(loss.detach(), factor)
        by: Weight = factor
        if isinstance(factor, Tensor):
            by = factor.to(loss.device, loss.dtype)

        def weighted(gradient: Tensor) -> Tensor:
            window.num_passes += 1
            return gradient * by

        loss.register_hook(weighted)
        return None

    def _is_told(self, dtype: torch.dtype) -> bool:
        """Whether the window's total is known and the loss can carry w / total, which
        half precision would round; its windows are divided at the end."""
        window = self._window
        if window.expected is not None and not window.losses:
            window.divides_late = dtype in HALF and len(self.strategies) == 1
        return window.expected is not None and not window.divides_late

    def _streamed(
        self, loss: Tensor, weight: Weight, divided_by: int, expected: int
    ) -> tuple[Tensor, Weight]:
        """w / r, and what the weight is after the rounding of a half-precision loss."""
        if self._reference.value is None:
            self._reference.agree(weight, expected, loss.device)
        inverse = self._reference.inverse(divided_by)
        by_mean = self._reduction == "mean"
        factor = inverse * weight if by_mean else inverse
        applied: Weight = weight
        if by_mean and loss.dtype in HALF:
            applied = factor.to(loss.dtype) / inverse
        to_opening = self._factor.to_opening(loss.device)
        return factor if to_opening is None else factor * to_opening, applied

    def expect(
        self,
        batches: Iterable[Any] = (),
        *,
        weights: Mapping[str, Sequence[Weight]] | None = None,
    ) -> None:
        """Tell the window that opens: these are all micro-batches of this rank.

        Their weights are summed before the first forward pass, and travel between the
        ranks while it computes. `backward` then takes them in this order.

        Args:
            batches: what the strategies weigh, one for each micro-batch.
            weights: the weights themselves, for each term.
        """
        refusals.refuse_late_telling(self._window, self._nonfinite)
        if weights is None:
            weights = weights_by_term(self.strategies, batches)
        expected = Expected(weights, self.ranks, self._device())
        if (ddp := self.ranks.ddp) is not None:
            refusals.refuse_static_graph(ddp, expected.num_micro_batches - 1)
            refusals.refuse_join(ddp)
        self._window.expected = expected

    def take(self, loss: Tensor | Mapping[str, Tensor]) -> tuple[Tensor, Weight]:
        """The loss that the backward pass of the next expected micro-batch is to start
        from, and what that weighs; for a loop that runs backward passes by itself."""
        expected = self._window.expected
        if expected is None:
            raise refusals.untold_terms(self.strategies)
        weights = expected.next_weights()
        if len(self.strategies) == 1 and isinstance(loss, Tensor):
            return loss, weights[self._first]
        if not isinstance(loss, Mapping):
            raise refusals.missing_terms(loss, self.strategies)
        joined = join(loss, weights, self.strategies, expected)
        self._window.joined = joined
        return joined.loss, joined.weight

    def passed(self) -> None:
        """A backward pass that `weigh` has prepared is over."""
        if self.wide is not None:
            is_apart = self.ranks.holds_back_gradients
            self.wide.join(self._training())
            self.wide.take(is_shared=self.ranks.backend_sums and not is_apart)
            return
        # FSDP moves gradients about between passes, which is nobody's zeroing.
        if self.ranks.ddp is not None or not self.ranks.backend_sums:
            looks = self._is_first or self._is_written
            self._window.left = Left(self.parameters, looks_before=looks)

    def _look_at_left(self) -> None:
        """Refuse a window whose gradients have been zeroed between two passes."""
        left, self._window.left = self._window.left, None
        zeroed = None if left is None else left.are_zeroed()
        if zeroed is not None:
            self._is_written = True
            self._zeroed.append((self._window.num_weighted, LateReading(zeroed)))
        self._read_zeroed()

    def _read_zeroed(self, *, wait: bool = False) -> None:
        while self._zeroed and (wait or self._zeroed[0][1].arrived):
            num_weighted, reading = self._zeroed.popleft()
            flags = reading.values()
            refusals.refuse_zeroed(flags, num_weighted)
            if 1 in flags and not self._has_said_zeroed:
                self._has_said_zeroed = True
                refusals.announce_zeroed(flags)

    def settle(self, weight: Weight, expected: int, device: torch.device) -> None:
        """Agree on r before the first forward pass, where one of them may fail on one
        rank alone.

        Args:
            weight: of this rank's first micro-batch.
            expected: how many micro-batches the window will have on this rank.
            device: where the ranks meet.
        """
        if self._reference.value is None:
            self._reference.agree(weight, expected, device)

    def mark(self) -> Window:
        """What the open window holds, for `rewind`."""
        return self._window.copy()

    def rewind(self, mark: Window) -> None:
        """Go back to a mark; gradients are the caller's."""
        self._window = mark.copy()
        self._window.left = None

    def count(
        self, *, padding: Weight = 0, tokens: Weight = 0, samples: Weight = 0
    ) -> None:
        """Count what `WindowStats` shows: tokens, those that only pad, samples."""
        self._window.padding.append(padding)
        self._window.tokens.append(tokens)
        self._window.samples.append(samples)

    def drop(self) -> int:
        """Forget the open window; say how many micro-batches it held.

        Its gradients stay in the parameters: zero them.
        """
        held = self.num_micro_batches
        self._close()
        if self.wide is not None:
            self.wide.drop()
        return held

    def _close(self) -> None:
        self._window = Window()
        self._factor.opening = None

    def _device(self) -> torch.device:
        """Where the ranks meet: with the losses, or with what the group can carry."""
        if self._window.losses:
            return self._window.losses[-1].device
        if isinstance(self._module, nn.Module):
            return next((p.device for p in self._module.parameters()), default_device())
        if self._reference.value is not None:
            return self._reference.value.device
        return default_device()

    @property
    def _first(self) -> str:
        """The term by which the window is measured; its only one, mostly."""
        return next(iter(self.strategies))

    @property
    def _reduction(self) -> LossReduction:
        """How the losses of the window's row are added up."""
        return "sum" if len(self.strategies) > 1 else self.strategy.loss_reduction
