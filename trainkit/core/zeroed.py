"""The check that nobody zeroes an open window's gradients between backward passes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from operator import is_

import torch
from torch import Tensor

from trainkit.core import refusals
from trainkit.core._compat import versions_of
from trainkit.core.gradients import values_of
from trainkit.core.late_reading import LateReading


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
