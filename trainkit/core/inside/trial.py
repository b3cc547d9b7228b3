"""Rows of a call that run to be looked at, without a graph and with one."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from trainkit.core._compat import without_hooks
from trainkit.core.batch_norm.layers import listed
from trainkit.core.generators import States
from trainkit.core.inside.chunks import Chunk
from trainkit.core.inside.cut import Cut
from trainkit.core.inside.moment import Moment, attributes_of, versions_of
from trainkit.core.inside.outputs import Joint, Plan, Unfit
from trainkit.core.inside.rows import Arguments
from trainkit.core.inside.shadows import nodes_of, strangers_of
from trainkit.core.nested import Field

FEW = 4
"""The most rows whose gradient is compared with that of their halves."""

REENTRANT = "CheckpointFunctionBackward"

ON_DEVICE = 2**-11
"""Kernels of a device may round products to so few digits (TF32)."""


class Trial:
    """Runs rows of one call, always with the same draws.

    Args:
        cut: which is called.
        arguments: of the call.
        moment: what the module is like.

    Attributes:
        begun: the random states that each run begins with.
        has_graph: whether graphs are looked at too.
        has_drawn: whether the last run drew random numbers.
        eps: the coarsest rounding of what graphs have saved.
    """

    def __init__(self, cut: Cut, arguments: Arguments, moment: Moment) -> None:
        self.cut, self.arguments = cut, arguments
        self.begun = States(arguments.devices)
        self._shadows = cut.shadows(moment.parameters)
        self.has_graph = torch.is_grad_enabled()
        self.has_drawn = False
        self.eps = 0.0

    def run(self, rows: Sequence[int] | Chunk) -> list[Any]:
        """The outputs for some rows, or for a chunk, without a graph."""
        return [each.value for each in self.fields(rows)]

    def fields(self, rows: Sequence[int] | Chunk) -> list[Field]:
        """The outputs for some rows, with their paths."""
        arguments = self.arguments
        if isinstance(rows, Chunk):
            given = arguments.of(rows, arguments.values)
        else:
            given = arguments.taken(rows)
        versions = versions_of(given)
        with torch.no_grad(), self._again():
            fields, _ = self.cut.run(arguments, given)
        if versions != versions_of(given):
            raise Unfit("it changes its arguments in place")
        return fields

    @contextlib.contextmanager
    def _again(self) -> Iterator[None]:
        """Random states as they were, and whether they have moved."""
        self.begun.put_back()
        yield
        self.has_drawn = not self.begun.are(States(self.arguments.devices))

    def _given(self, rows: Sequence[int]) -> tuple[list[Any], list[Tensor]]:
        """The values of some rows, and those of them that train."""
        given = self.arguments.taken(rows)
        for index, value in enumerate(self.arguments.values):
            if isinstance(value, Tensor) and value.requires_grad:
                given[index] = given[index].detach().requires_grad_()
        return given, [x for x in given if isinstance(x, Tensor) and x.requires_grad]

    # ---- what a graph leaves ---------------------------------------------------------

    def refuse_what_is_left(self, rows: Sequence[int]) -> None:
        """Refuse a graph that outlives the outputs: the loss may depend on it, or the
        next chunk, which has none."""
        module, (given, leaves) = self.cut.module, self._given(rows)
        held: list[weakref.ref[Any]] = []

        def pack(tensor: Tensor) -> _Held:
            found = _Held(tensor.detach())
            held.append(weakref.ref(found))
            if tensor.is_floating_point():
                self.eps = max(self.eps, torch.finfo(tensor.dtype).eps)
            return found

        with torch.enable_grad(), self._shadows.in_place(), self._again():
            try:
                with saved_tensors_hooks(pack, lambda held: held.tensor):
                    fields = self.cut.run(self.arguments, given)[0]
            except RuntimeError as error:
                # Functions of torch.func refuse what is added to a graph.
                words = "saved tensor hooks", "functorch"
                if not any(word in str(error) for word in words):
                    raise
                self.has_graph = False
                return
        outputs = [each.value for each in fields]
        if any(node.name() == REENTRANT for node in nodes_of(outputs)):
            raise Unfit(
                "it has activation checkpoints with use_reentrant=True, which warn of "
                "each chunk that runs without a graph. Write use_reentrant=False"
            )
        known = [*self._shadows.own, *leaves]
        strangers = strangers_of(outputs, known, self.cut.name)
        foreign = list(map(weakref.ref, strangers))  # one made anew in each run goes
        others = [each for each in fields if not isinstance(each.value, Tensor)]
        del fields, outputs, strangers, known, given, leaves
        if _are_alive(foreign):
            raise Unfit(
                "its output depends on a tensor that trains, and is neither a "
                "parameter of it nor an argument"
            )
        names = [
            name
            for name, value in attributes_of(module).items()
            if isinstance(value, Tensor) and value.grad_fn is not None
        ]
        if not names and not _are_alive(held):
            return
        for path, value in others:
            if hasattr(value, "__dict__") or isinstance(value, set):
                raise Unfit(
                    f"its output {path!r} is a {type(value).__name__}, which cannot be "
                    f"joined from those of chunks"
                )
        where = listed(names) if names else "a list, a hook or a cache"
        raise Unfit(
            f"its forward leaves tensors with a gradient in {where}, where each chunk "
            f"overwrites those of the one before. Return them as outputs, or detach() "
            f"them"
        )

    # ---- gradients -------------------------------------------------------------------

    def has_mixed_gradients(self, plan: Plan, size: int) -> bool:
        """Whether a gradient of some rows is not the sum of their halves': a hook or an
        own backward pass may mix rows that the forward pass keeps apart."""
        rows = self.arguments.rows
        num = min(rows, FEW, size)
        # Once more on other rows: a kink may lie where rounding differs.
        found = [self._is_mixed(plan, range(at, at + num)) for at in (0, rows - num)]
        self._shadows.clear()
        return all(found)

    def _is_mixed(self, plan: Plan, rows: Sequence[int]) -> bool:
        arguments, shadows, num = self.arguments, self._shadows, len(rows)
        given, leaves = self._given(rows)
        if num < 2 or not (shadows.own or leaves):
            return False
        shadows.clear()
        sizes: list[float] = []
        for start, stop, sign in ((0, num, 1), (0, num // 2, -1), (num // 2, num, -1)):
            with torch.enable_grad(), shadows.in_place(), self._again():
                part = arguments.of(Chunk(start, stop), given)
                with without_hooks():
                    fields = self.cut.run(arguments, part)[0]
                pulled = [
                    (x.value, sign * _direction(x.value, joint, start))
                    for x, joint in zip(fields, plan, strict=True)
                    if isinstance(x.value, Tensor) and x.value.requires_grad
                    # What has no rows has one gradient, of any of them.
                    if joint.dim is not None or not start
                ]
                if not pulled:
                    return False
                before = States(arguments.devices)
                outputs, given_to = (list(each) for each in zip(*pulled, strict=True))
                torch.autograd.backward(outputs, given_to)
                if not before.are(States(arguments.devices)):
                    return False  # what draws cannot be compared
            found = [*shadows.gradients(), *[each.grad for each in leaves]]
            norms = [float(x.double().norm()) for x in found if x is not None]
            sizes.append(sum(each**2 for each in norms) ** 0.5)
            for each in outputs:
                rounding = torch.finfo(each.dtype).eps
                on_device = 0.0 if each.device.type == "cpu" else ON_DEVICE
                self.eps = max(self.eps, rounding, on_device)
        return sizes[0] * 3 * self.eps**0.5 < sizes[-1] < torch.inf


class _Held:
    """What a graph saved; it lives as long as the graph."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def _are_alive(held: Sequence[weakref.ref[Any]]) -> bool:
    if any(each() is not None for each in held):
        gc.collect()
    return any(each() is not None for each in held)


def _direction(value: Tensor, joint: Joint, start: int) -> Tensor:
    """A gradient that gives each row its own, whichever rows are beside it."""
    if joint.dim is None:
        return torch.ones_like(value)
    inner = value.detach().movedim(joint.dim, 0)
    places = torch.arange(value.numel(), device=value.device).view(inner.shape)
    wide = (places + start * joint.multiple * inner[0].numel()).double()
    return wide.mul(1.7).cos().movedim(0, joint.dim).to(value.dtype)
