"""Gradients: reading, dividing and clearing them, and the sum of an open window's."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainkit.core._compat import version_of
from trainkit.core.checks import LateReading
from trainkit.core.ranks import Ranks, sum_over_ranks_
from trainkit.core.window import DIVISOR, Window
from trainkit.errors import TrainkitError

HALF = (torch.float16, torch.bfloat16)


def parameters_of(optimizer_or_parameters: Any) -> list[Tensor]:
    """The parameters of an optimizer, or the given parameters, without repetition."""
    groups = getattr(optimizer_or_parameters, "param_groups", None)
    if groups is not None:
        found = [p for group in groups for p in group["params"]]
    elif isinstance(optimizer_or_parameters, Tensor):
        found = [optimizer_or_parameters]
    elif isinstance(optimizer_or_parameters, Iterable):
        found = list(optimizer_or_parameters)
    else:
        found = [optimizer_or_parameters]
    for parameter in found:
        if not isinstance(parameter, Tensor):
            raise TrainkitError(
                f"finish(): takes an optimizer or its parameters, received "
                f"{type(parameter).__name__}. Pass the optimizer, or "
                f"model.parameters()."
            )
    if not found:
        raise TrainkitError(
            "finish(): received no parameters, so nothing would be divided. A "
            "generator such as model.parameters() is used up after one pass. Pass "
            "the optimizer, or a list."
        )
    return list(dict.fromkeys(found))  # a tensor's hash is its id: none is compared


def gradients_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    """The gradients of these parameters; of a sharded one, this rank's part."""
    found = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            is_sharded = isinstance(gradient, DTensor)
            found.append(gradient.to_local() if is_sharded else gradient)
    return found


def values_of(tensor: Tensor) -> Tensor:
    """A dense tensor of this rank's numbers, from a sharded or sparse one too."""
    own = _local(tensor)
    return own.coalesce().values() if own.is_sparse else own


def clear_gradients(optimizer_or_parameters: Any) -> None:
    """Set all gradients to None, as `optimizer.zero_grad()` does."""
    for parameter in parameters_of(optimizer_or_parameters):
        parameter.grad = None


@torch.no_grad()
def scale_(gradients: Iterable[Tensor], scale: Tensor | float) -> None:
    """Multiply gradients by a number, which is never rounded to half precision."""
    alike: dict[Any, list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        if gradient.is_sparse or gradient.is_complex():
            gradient.mul_(_as(scale, gradient.device))
        else:
            alike[gradient.device, gradient.dtype].append(gradient)
    for (device, dtype), dense in alike.items():
        if dtype in HALF:
            factor = _as(scale, device, torch.float32)
            for gradient in dense:
                gradient.copy_(gradient.float().mul_(factor))
        else:
            factor = _as(scale, device, dtype)
            if device.type == "cpu" and not isinstance(factor, Tensor):
                # Else every gradient would make a tensor of it.
                factor = torch.full((), factor, dtype=dtype, device=device)
            # One kernel for all of them; torch.optim uses it too.
            torch._foreach_mul_(dense, factor)  # pyright: ignore[reportPrivateImportUsage]


def _as(scale: Tensor | float, *place: Any) -> Tensor | float:
    return scale.to(*place) if isinstance(scale, Tensor) else scale


@torch.no_grad()
def total_norm(parameters: Iterable[Tensor], apart: Ranks | None) -> Tensor | None:
    """The 2-norm of all gradients together; None if there are no gradients.

    Args:
        parameters: whose gradients.
        apart: the ranks over which plain tensors are shards (FSDP1); otherwise None.
    """
    found = [p.grad for p in parameters if p.grad is not None]
    if not found:
        return None
    dense = [g.coalesce().values() if g.is_sparse else g for g in found]
    norm = torch.nn.utils.get_total_norm(dense)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    return norm if apart is None else apart.sum_(norm.square()).sqrt()


@torch.no_grad()
def are_finite(parameters: Iterable[Tensor]) -> bool:
    """Whether all gradients and parameters are finite; waits for the device."""
    return all(
        bool(values_of(tensor).isfinite().all())
        for parameter in parameters
        for tensor in (parameter, parameter.grad)
        if tensor is not None
    )


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


# ---- the gradient of an open window --------------------------------------------------


class GradientSum:
    """The sum of a window's gradients: in the parameters, as autograd adds them up, or
    in float32 beside them.

    Args:
        module: the module that trains, if it is known.
        ranks: the ranks that share the window.

    Attributes:
        parameters: the parameters that train; without a module, those of the window
            that closed last.
        wide: the sums in float32, `WideGradients`, if they are kept there.
        zeroed: checks that nobody zeroes the gradients inside the window.
        norms: measures what each pass of the window adds, if somebody asks for it:
            `begin` and `end` of each pass, `forget`, and `close` of the window.
    """

    def __init__(self, module: Any, ranks: Ranks) -> None:
        self.parameters: list[Tensor] = []
        if isinstance(module, nn.Module):
            self.parameters = trained(module)
        self.wide: Any = None
        self.zeroed = ZeroedWatch()
        self.norms: Any = None
        self._ranks = ranks
        self._trained_at_first: dict[int, bool] = {}

    def begin(self, window: Window) -> None:
        """A backward pass of the window begins."""
        if window.num_passes:
            self.zeroed.check(window, self.parameters)
        else:
            self._trained_at_first = {id(p): p.requires_grad for p in self.parameters}
            if self.wide is not None:
                self.wide.join(self.parameters)
        if self.norms is not None:
            self.norms.begin()

    def add(self) -> None:
        """Add the gradients that a backward pass has left in the parameters."""
        if self.norms is not None:
            self.norms.end()
        if self.wide is not None:
            self.wide.take()
        # FSDP moves gradients about between passes, which must not look like zeroing.
        elif self._ranks.ddp is not None or not self._ranks.backend_sums:
            self.zeroed.hold(self.parameters)

    def end(self, window: Window, owners: Any, *, may_be_written: bool) -> list[Tensor]:
        """Return the gradients of a window that is about to close; refuse one in which
        parameters were frozen or unfrozen, or gradients were zeroed.

        Args:
            window: the open window.
            owners: an optimizer or parameters, whose gradients it has.
            may_be_written: whether something else does, as a scaler unscales them.
        """
        if not may_be_written:
            self.zeroed.check(window, self.parameters)
        self.parameters = parameters_of(owners)
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
        return gradients_of(self.parameters)

    def divide(
        self, gradients: list[Tensor], scale: Tensor | float | None, *, is_apart: bool
    ) -> None:
        """Multiply the sum by `scale`, and make it equal on all ranks.

        Args:
            gradients: those that `end` has returned.
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

    def are_finite(self) -> bool:
        """Whether no gradient and no parameter is NaN or infinite; waits for the
        device."""
        return are_finite(self.parameters)

    def forget(self) -> None:
        """Forget the passes of a window that is over, or begins anew."""
        self.zeroed.forget()
        if self.norms is not None:
            self.norms.forget()

    def drop(self) -> None:
        """Forget the sum in float32; gradients in the parameters stay there."""
        if self.wide is not None:
            self.wide.drop()


def trained(module: nn.Module) -> list[Tensor]:
    """The parameters that require a gradient."""
    return [p for p in module.parameters() if p.requires_grad]


class ZeroedWatch:
    """Refuses a window whose gradients were zeroed between two of its passes.

    The first and the last gradient are looked at. Where both were removed or written
    over, as autograd's counters show, all are read, and nothing waits for the device.
    """

    def __init__(self) -> None:
        self._held: list[tuple[Tensor, Tensor, int]] = []
        self._late: deque[tuple[int, LateReading]] = deque()

    def hold(self, parameters: Sequence[Tensor]) -> None:
        """Remember what a backward pass has left in two of these parameters."""
        self._held = []
        for order in (parameters, reversed(parameters)):
            for parameter in order:
                if (gradient := parameter.grad) is not None:
                    self._held.append((parameter, gradient, version_of(gradient)))
                    break

    def forget(self) -> None:
        """Forget what was held: the window is gone, or other gradients are back."""
        self._held = []

    def check(self, window: Window, parameters: Iterable[Tensor]) -> None:
        """Check whether what was held is still there; if it is not, whether any of
        these parameters has a gradient."""
        held, self._held = self._held, []
        for parameter, gradient, version in held:
            if parameter.grad is gradient and version_of(gradient) == version:
                break  # nobody has zeroed all of them
        else:
            if held:
                self._read_later(gradients_of(parameters), window)
        if self._late:
            self.read()

    def _read_later(self, left: list[Tensor], window: Window) -> None:
        """Have gradients read that were written over; some may be removed."""
        number = len(window.entries)
        if not left:
            raise _gone(number)
        device = left[0].device
        weight: Any = sum(window.applied)
        if window.carried is not None:
            weight = weight + window.carried[DIVISOR]
        is_left = [values_of(g).detach().any().to(device) for g in left]
        weighs = torch.as_tensor(weight, device=device) > 0
        is_gone = weighs & ~torch.stack(is_left).any()
        self._late.append((number, LateReading(is_gone)))

    def read(self, *, wait: bool = False) -> None:
        """Report what has reached the host; `wait` waits for the rest too."""
        while self._late and (wait or self._late[0][1].arrived):
            number, reading = self._late.popleft()
            if reading.values():
                raise _gone(number)


def _gone(number: int) -> TrainkitError:
    return TrainkitError(
        f"backward(): the window is open, and the gradients of the {number} "
        f"micro-batches in it are gone: they were zeroed or removed after a backward "
        f"pass. Call zero_grad() only after optimizer.step(), at the end of a window."
    )
