"""Gradients that somebody zeroes while a window is open."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterable

import torch
from torch import Tensor

from trainkit.core._compat import version_of
from trainkit.core.checks import LateReading
from trainkit.core.gradients import values_of
from trainkit.core.window import Window
from trainkit.errors import TrainkitError


class ZeroedWatch:
    """Refuses a window whose gradients were zeroed between two of its passes.

    Autograd counts how often each tensor is written over. These counters show, without
    reading the gradients, whether something has written into them. Only then are they
    read: if all of them are zero, and the window weighs something, they were zeroed. If
    some of them are, that is said once. Nothing waits for the device.
    """

    def __init__(self) -> None:
        self._held: list[tuple[Tensor, Tensor, int]] = []
        self._were_zero: list[Tensor | int] | None = None
        self._is_written = self._has_said = False
        self._late: deque[tuple[int, LateReading]] = deque()

    def hold(self, parameters: Iterable[Tensor]) -> None:
        """Remember what a backward pass has left in these parameters.

        Once something has written into gradients, it is also remembered which were
        zero before.
        """
        held = []
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is not None:
                held.append((parameter, gradient, version_of(gradient)))
        self._held = held
        if self._is_written:
            self._were_zero = [_is_zero(gradient) for _, gradient, _ in held]

    def forget(self) -> None:
        """Forget what was held: the window is gone, or other gradients are back."""
        self._held, self._were_zero = [], None

    def check(self, window: Window) -> None:
        """Check whether the held gradients are still those that were held."""
        written = []
        for index, (parameter, gradient, version) in enumerate(self._held):
            if parameter.grad is not gradient or version_of(gradient) != version:
                written.append(index)
        if written:
            self._is_written = True
            reading = LateReading(self._flags(written, window))
            self._late.append((window.num_weighted, reading))
        self._held, self._were_zero = [], None
        if self._late:
            self.read()

    def read(self, *, wait: bool = False) -> None:
        """Report what has reached the host; `wait` waits for the rest too."""
        while self._late and (wait or self._late[0][1].arrived):
            num_micro_batches, reading = self._late.popleft()
            weighs, *flags = reading.values()
            counting = [flag for flag in flags if flag >= 0]
            if weighs and counting and all(counting):
                raise TrainkitError(
                    f"backward(): the window is open, and the gradients of the "
                    f"{num_micro_batches} micro-batches in it are gone: they were "
                    f"zeroed or removed after a backward pass. Call zero_grad() only "
                    f"after optimizer.step(), at the end of a window."
                )
            if 1 in flags and not self._has_said:
                self._has_said = True
                warnings.warn(
                    f"window: {flags.count(1)} of its {len(flags)} gradients were "
                    f"written over while it was open, and are zero now. The step is "
                    f"the big batch's if the gradients of every micro-batch are "
                    f"changed alike, by a mask for example. It is not after "
                    f"zero_grad() of a part of the model: call that after "
                    f"optimizer.step(). Said once.",
                    stacklevel=2,
                )

    def _flags(self, written: list[int], window: Window) -> Tensor:
        """Whether the window weighs something; then a flag for each gradient.

        1 is a gradient that was written over and is zero now, 2 one of which it is not
        known whether it was zero before, -1 one that was, 0 any other.
        """
        flags: list[Tensor | int] = [0] * len(self._held)
        for index in written:
            known = self._were_zero
            is_zero = _is_zero(self._held[index][0].grad)
            flags[index] = is_zero * (1 - 2 * known[index] if known else 2)
        weight = sum(window.applied)
        weighs = (weight > 0).int() if isinstance(weight, Tensor) else int(weight > 0)
        row = [weighs, *flags]
        device = next((f.device for f in row if isinstance(f, Tensor)), None)
        return torch.stack([torch.as_tensor(f, device=device) for f in row])


def _is_zero(gradient: Tensor | None) -> Tensor | int:
    if gradient is None:
        return 1
    return 1 - values_of(gradient).detach().any().int()
