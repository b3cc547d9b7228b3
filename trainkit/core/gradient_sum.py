"""The gradient of an open window: where it is added up and divided."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from operator import is_
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from trainkit.core import refusals
from trainkit.core._compat import versions_of
from trainkit.core.checks import LateReading
from trainkit.core.division import Streamed, Told, unit_of
from trainkit.core.gradients import (
    are_finite,
    gradients_of,
    leaves_of,
    scale_,
    sum_over_ranks_,
    values_of,
)
from trainkit.core.ranks import Ranks
from trainkit.core.wide_gradients import WideGradients
from trainkit.core.window import Window
from trainkit.errors import TrainkitError


class ZeroedWatch:
    """Refuses a window whose gradients were zeroed between two of its passes.

    It also remembers which gradients were zero before: in the first window, and in all
    windows once something other than autograd has written into the gradients.
    """

    def __init__(self) -> None:
        self._held: HeldGradients | None = None
        self._late: deque[tuple[int, LateReading]] = deque()
        self._looks_before = True
        self._is_written = self._has_said = False

    def hold(self, parameters: Iterable[Tensor]) -> None:
        """Remember what a backward pass has left in these parameters."""
        self._held = HeldGradients(parameters, looks_before=self._looks_before)

    def check(self, num_micro_batches: int) -> None:
        """Check whether the held gradients are still there.

        Args:
            num_micro_batches: how many passes the window has had, for the message.
        """
        held, self._held = self._held, None
        zeroed = None if held is None else held.are_zeroed()
        if zeroed is not None:
            self._looks_before = self._is_written = True
            self._late.append((num_micro_batches, LateReading(zeroed)))
        self.read()

    def read(self, *, wait: bool = False) -> None:
        """Report what has reached the host; `wait` waits for the rest too."""
        while self._late and (wait or self._late[0][1].arrived):
            num_micro_batches, reading = self._late.popleft()
            flags = reading.values()
            refusals.refuse_zeroed(flags, num_micro_batches)
            if 1 in flags and not self._has_said:
                self._has_said = True
                refusals.announce_zeroed(flags)

    def forget(self) -> None:
        """Forget the held gradients: the window is gone, or others were put back."""
        self._held = None

    def close(self) -> None:
        """End a window: the next one is looked at closely only if there is reason."""
        self._looks_before = self._is_written


class HeldGradients:
    """The gradients of an open window, as its last pass left them.

    Autograd counts how often each tensor is written over. These counters show, without
    reading the gradients, whether something has written into them between two passes.
    Only then are the gradients read: one that is zero now was zeroed, unless it was
    zero before (as in a window that weighs nothing so far).

    Args:
        parameters: whose gradients.
        looks_before: remember which are zero already; False assumes that none is.
    """

    def __init__(
        self, parameters: Iterable[Tensor], *, looks_before: bool = False
    ) -> None:
        held = [(p, p.grad) for p in parameters if p.grad is not None]
        self._parameters = [parameter for parameter, _ in held]
        self._gradients = [gradient for _, gradient in held]
        self._versions = versions_of(self._gradients)
        self._were_zero: list[Tensor | int] | None = None
        if looks_before:
            self._were_zero = [_is_zero(gradient) for gradient in self._gradients]

    def are_zeroed(self) -> Tensor | None:
        """A flag for each gradient; None if none has been written over since.

        1 is a gradient that was written over and is zero now, -1 one that was zero
        before, 0 any other. Nothing waits for the device.
        """
        found = [parameter.grad for parameter in self._parameters]
        versions = versions_of(self._gradients)
        if versions == self._versions and all(map(is_, found, self._gradients)):
            return None
        flags: list[Tensor | int] = [0] * len(found)
        for index, (new, old) in enumerate(zip(found, self._gradients, strict=True)):
            if new is not old or versions[index] != self._versions[index]:
                was_zero = self._were_zero[index] if self._were_zero else 0
                flags[index] = _is_zero(new) * (1 - 2 * was_zero)
        return _stacked(flags)


def _is_zero(gradient: Tensor | None) -> Tensor | int:
    if gradient is None:
        return 1
    return 1 - values_of(gradient).detach().any().int()


def _stacked(flags: Sequence[Tensor | int]) -> Tensor:
    device = next((f.device for f in flags if isinstance(f, Tensor)), None)
    return torch.stack([torch.as_tensor(f, device=device) for f in flags])


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
        self._training_at_first: dict[int, bool] = {}
        self._ranks = ranks
        self.zeroed = ZeroedWatch()
        self.norms: Norms | None = None

    def keep_wide(self, training: Callable[[], Iterable[Tensor]]) -> None:
        """Keep the window's gradient in float32 from now on, and round it once.

        Args:
            training: returns the parameters that train. It is called after each
                backward pass, since finetuning may unfreeze more of them.
        """
        self._training = training
        self.wide = WideGradients(training(), ranks=self._ranks)

    def begin(self, num_passes: int, loss: Tensor) -> None:
        """A backward pass begins at `loss`; the window has had so many before it."""
        self.check(num_passes)
        if not self.parameters:
            self.parameters = leaves_of(loss)
        if not num_passes:
            self._training_at_first = {id(p): p.requires_grad for p in self.parameters}
        if self.norms is not None:
            self.norms.begin()

    def check(self, num_passes: int) -> None:
        """Refuse gradients that were zeroed after the last of the window's passes."""
        self.zeroed.check(num_passes)

    def refuse_frozen(self) -> None:
        """Refuse parameters that were frozen or unfrozen while the window was open."""
        first = self._training_at_first
        changed = [
            p for p in self.parameters if first.get(id(p)) is not p.requires_grad
        ]
        changed = [p for p in changed if id(p) in first]
        if changed:
            shape, number = list(changed[0].shape), len(changed)
            raise TrainkitError(
                f"requires_grad: it has changed for {number} parameters, the first of "
                f"shape {shape}, while a window was open, so that a part of its "
                f"micro-batches has trained them. Freeze and unfreeze between two "
                f"windows, for example at the start of an epoch."
            )

    def rewind(self, num_passes: int) -> None:
        """Return to an earlier place in the window, whose gradients are back."""
        self.zeroed.forget()
        if self.norms is not None:
            self.norms.rewind(num_passes)

    def add(self) -> None:
        """Add the gradients that a backward pass has left in the parameters."""
        if self.norms is not None:
            self.norms.end()
        if self.wide is not None:
            is_apart = self._ranks.holds_back_gradients
            self.wide.join(self._training())
            self.wide.take(is_shared=self._ranks.backend_sums and not is_apart)
            return
        # FSDP moves gradients about between passes, which must not look like zeroing.
        if self._ranks.ddp is not None or not self._ranks.backend_sums:
            self.zeroed.hold(self.parameters)

    def measure(
        self,
        window: Window,
        division: Told | Streamed,
        streamed: Streamed,
        totals: Tensor,
    ) -> None:
        """Measure the window that is about to be divided, if somebody asks for it."""
        if self.norms is not None:
            unit = unit_of(division, streamed, totals, window.reduction)
            self.norms.close(window, unit)

    def divide(self, scale: Tensor | None, *, is_apart: bool) -> None:
        """Multiply the sum by `scale`, and make it equal on all ranks.

        Args:
            scale: None if each gradient was divided as it came.
            is_apart: whether no backward pass of the window has communicated.
        """
        rest = self.parameters
        if self.wide is not None:
            self.wide.hand_over(scale)
            rest = self.wide.others(rest)
        if scale is not None:
            scale_(gradients_of(rest), scale)
        if self._ranks.size > 1 and (is_apart or not self._ranks.backend_sums):
            sum_over_ranks_(rest, self._ranks, times=1 / self._ranks.multiplier)
        self.zeroed.close()

    def are_lost(self) -> bool:
        """Whether a gradient or a weight is NaN or infinite; waits for the device."""
        return not are_finite(self.parameters)

    def drop(self) -> None:
        """Forget the sum in float32; gradients in the parameters stay there."""
        if self.wide is not None:
            self.wide.drop()


def trained(module: nn.Module) -> list[Tensor]:
    """The parameters that require a gradient."""
    return [p for p in module.parameters() if p.requires_grad]
