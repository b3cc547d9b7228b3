"""The gradient of an open window: where it is added up, divided and looked after."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from torch import Tensor, nn

from trainkit.core.gradients import (
    gradients_of,
    leaves_of,
    scale_,
    sum_over_ranks_,
)
from trainkit.core.ranks import Ranks
from trainkit.core.wide_gradients import WideGradients
from trainkit.core.window import Window
from trainkit.core.zeroed_gradients import ZeroedWatch
from trainkit.errors import TrainkitError


class Norms(Protocol):
    """Measures what the passes of a window add to its gradient."""

    def begin(self) -> None:
        """A backward pass of the window begins."""

    def end(self) -> None:
        """It has ended."""

    def rewind(self, num_passes: int) -> None:
        """Forget all passes of the window but the first ones."""

    def close(self, window: Window, unit: Tensor) -> None:
        """The window ends; `unit` turns its gradients into sums of w_i g_i."""


class GradientSum:
    """The sum of a window's gradients: in the parameters, as autograd adds them up, or
    in float32 beside them.

    Args:
        module: the module that trains, if it is known.
        ranks: the ranks that share the window.

    Attributes:
        parameters: the parameters that train; without a module, the first loss shows
            them.
        wide: the sums in float32, if `keep_wide` was called.
        zeroed: checks that nobody zeroes the gradients inside the window.
        norms: measures what each pass of the window adds, if somebody asks for it.
    """

    def __init__(self, module: Any, ranks: Ranks) -> None:
        self.parameters: list[Tensor] = []
        if isinstance(module, nn.Module):
            self.parameters = trained(module)
        self.wide: WideGradients | None = None
        self.zeroed = ZeroedWatch()
        self.norms: Norms | None = None
        self._ranks = ranks
        self._trained_at_first: dict[int, bool] = {}

    def keep_wide(self, training: Callable[[], Iterable[Tensor]]) -> None:
        """Keep the window's gradient in float32 from now on, and round it once.

        Args:
            training: returns the parameters that train. It is called after each
                backward pass, since finetuning may unfreeze more of them.
        """
        self._training = training
        self.wide = WideGradients(training(), ranks=self._ranks)

    def begin(self, window: Window, loss: Tensor) -> None:
        """A backward pass of the window begins at `loss`."""
        if not self.parameters:
            self.parameters = leaves_of(loss)
        if window.num_passes:
            self.zeroed.check(window)
        else:
            self._trained_at_first = {id(p): p.requires_grad for p in self.parameters}
        if self.norms is not None:
            self.norms.begin()

    def add(self) -> None:
        """Add the gradients that a backward pass has left in the parameters."""
        if self.norms is not None:
            self.norms.end()
        if self.wide is not None:
            is_apart = self._ranks.holds_back_gradients
            self.wide.join(self._training())
            self.wide.take(is_shared=self._ranks.backend_sums and not is_apart)
        # FSDP moves gradients about between passes, which must not look like zeroing.
        elif self._ranks.ddp is not None or not self._ranks.backend_sums:
            self.zeroed.hold(self.parameters)

    def refuse_changes(self, window: Window, *, may_be_written: bool) -> None:
        """Refuse to close a window in which parameters were frozen or unfrozen, or
        gradients were zeroed.

        Args:
            window: the open window.
            may_be_written: whether something else writes into its gradients.
        """
        if not may_be_written:
            self.zeroed.check(window)
        changed = []
        for parameter in self.parameters:
            trains = parameter.requires_grad
            if self._trained_at_first.get(id(parameter), trains) is not trains:
                changed.append(parameter)
        if changed:
            shape, number = list(changed[0].shape), len(changed)
            raise TrainkitError(
                f"requires_grad: it has changed for {number} parameters, the first of "
                f"shape {shape}, while a window was open, so that a part of its "
                f"micro-batches has trained them. Freeze and unfreeze between two "
                f"windows, for example at the start of an epoch."
            )

    def divide(
        self, gradients: list[Tensor], scale: Tensor | None, *, is_apart: bool
    ) -> None:
        """Multiply the sum by `scale`, and make it equal on all ranks.

        Args:
            gradients: those that the parameters have.
            scale: None if each gradient was divided as it came.
            is_apart: whether no backward pass of the window has communicated.
        """
        rest = self.parameters
        if self.wide is not None:
            self.wide.hand_over(scale)
            rest = self.wide.others(rest)
            gradients = gradients_of(rest)
        if scale is not None:
            scale_(gradients, scale)
        if self._ranks.size > 1 and (is_apart or not self._ranks.backend_sums):
            sum_over_ranks_(rest, self._ranks, times=1 / self._ranks.multiplier)

    def rewind(self, num_passes: int) -> None:
        """Return to an earlier place in the window, whose gradients are back."""
        self.zeroed.forget()
        if self.norms is not None:
            self.norms.rewind(num_passes)

    def drop(self) -> None:
        """Forget the sum in float32; gradients in the parameters stay there."""
        if self.wide is not None:
            self.wide.drop()


def trained(module: nn.Module) -> list[Tensor]:
    """The parameters that require a gradient."""
    return [p for p in module.parameters() if p.requires_grad]
