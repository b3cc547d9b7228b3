"""Gradients: reading, dividing and clearing them, and the sum of an open window's."""

from __future__ import annotations

import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
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


def leaves_of(loss: Tensor) -> list[Tensor]:
    """The tensors that get a gradient from a loss, read from its graph."""
    found, seen, waiting = [], set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found.append(leaf)
        waiting += [following for following, _ in node.next_functions]
    return found


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
        parameters: the parameters that train; without a module, the first loss shows
            them.
        wide: the sums in float32, if `keep_wide` was called.
        zeroed: checks that nobody zeroes the gradients inside the window.
        norms: measures what each pass of the window adds, if somebody asks for it:
            `begin` and `end` of each pass, `rewind`, and `close` of the window.
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

    def keep_wide(self, wide: Any, training: Callable[[], Iterable[Tensor]]) -> None:
        """Keep the window's gradient in float32 from now on, and round it once.

        Args:
            wide: `WideGradients` of the parameters that train.
            training: returns these. It is called after each backward pass, since
                finetuning may unfreeze more of them.
        """
        self.wide, self._training = wide, training

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

    def end(self, window: Window, owners: Any, *, may_be_written: bool) -> list[Tensor]:
        """Return the gradients of a window that is about to close; refuse one in which
        parameters were frozen or unfrozen, or gradients were zeroed.

        Args:
            window: the open window.
            owners: an optimizer or parameters, whose gradients it has.
            may_be_written: whether something else does, as a scaler unscales them.
        """
        self.parameters = parameters_of(owners)
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
            self._late.append((len(window.entries), reading))
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
        if window.carried is not None:
            weight = weight + window.carried[DIVISOR]
        weighs = (weight > 0).int() if isinstance(weight, Tensor) else int(weight > 0)
        row = [weighs, *flags]
        device = next((f.device for f in row if isinstance(f, Tensor)), None)
        return torch.stack([torch.as_tensor(f, device=device) for f in row])


def _is_zero(gradient: Tensor | None) -> Tensor | int:
    if gradient is None:
        return 1
    return 1 - values_of(gradient).detach().any().int()
