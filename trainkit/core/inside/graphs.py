"""Graphs of a few rows: what they leave behind, and whether gradients mix rows."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from trainkit.core.batch_norm.layers import listed
from trainkit.core.inside.chunks import Chunk
from trainkit.core.inside.draws import States
from trainkit.core.inside.outputs import Joint, Plan, Unfit
from trainkit.core.inside.shadows import leaves_of, refuse_strangers
from trainkit.core.inside.trial import Trial

FEW = 4
"""The most rows whose gradient is compared with that of their halves."""

REENTRANT = "CheckpointFunctionBackward"

ON_DEVICE = 2**-11
"""Kernels of a device may round products to so few digits (TF32)."""


def refuse_what_is_left(trial: Trial, size: int) -> None:
    """Refuse a graph that outlives the outputs: the loss may depend on it, or the
    next chunk, which has none."""
    arguments, module = trial.arguments, trial.cut.module
    rows = range(min(size, 2))
    given, leaves = trial.given(rows)
    held: list[weakref.ref[Any]] = []

    def pack(tensor: Tensor) -> _Held:
        found = _Held(tensor.detach())
        held.append(weakref.ref(found))
        if tensor.is_floating_point():
            trial.eps = max(trial.eps, torch.finfo(tensor.dtype).eps)
        return found

    with torch.enable_grad(), trial.shadows.in_place(), trial.again():
        try:
            with saved_tensors_hooks(pack, lambda held: held.tensor):
                fields = trial.cut.fields(None, None, arguments, given)
        except RuntimeError as error:
            if not _is_no_place_for_hooks(error):
                raise
            trial.has_graph = False
            return
    found = leaves_of([each.value for each in fields], refused=REENTRANT)
    known = {id(each) for each in (*trial.shadows.own, *leaves)}
    strangers = [each for each in found if id(each) not in known]
    refuse_strangers(
        [each for each in strangers if isinstance(each, nn.Parameter)],
        trial.cut.name,
    )
    others = [each for each in fields if not isinstance(each.value, Tensor)]
    del fields, found, strangers, given, leaves
    names = [
        f"{path}.{name}".lstrip(".")
        for path, each in module.named_modules()
        for name, value in vars(each).items()
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


def has_mixed_gradients(trial: Trial, plan: Plan, size: int) -> bool:
    """Whether a gradient of some rows is not the sum of their halves': a hook or an
    own backward pass may mix rows that the forward pass keeps apart."""
    rows = trial.arguments.rows
    num = min(rows, FEW, size)
    # Once more on other rows: a kink may lie where rounding differs.
    found = [_is_mixed(trial, plan, range(at, at + num)) for at in (0, rows - num)]
    trial.shadows.clear()
    return all(found)


def _is_mixed(trial: Trial, plan: Plan, rows: Sequence[int]) -> bool:
    arguments, shadows, num = trial.arguments, trial.shadows, len(rows)
    given, leaves = trial.given(rows)
    if num < 2 or not (shadows.own or leaves):
        return False
    shadows.clear()
    sizes: list[float] = []
    for start, stop, sign in ((0, num, 1), (0, num // 2, -1), (num // 2, num, -1)):
        with torch.enable_grad(), shadows.in_place(), trial.again():
            part = arguments.of(Chunk(start, stop), given)
            with saved_tensors_hooks(_itself, _itself):  # not those around
                fields = trial.cut.fields(None, None, arguments, part)
            pulled = [
                (x.value, sign * _direction(x.value, joint, start))
                for x, joint in zip(fields, plan, strict=True)
                if joint.dim is not None and x.value.requires_grad
            ]
            if not pulled:
                return False
            before = States(arguments.devices, of_host=True)
            outputs, given_to = (list(each) for each in zip(*pulled, strict=True))
            torch.autograd.backward(outputs, given_to)
            if not before.are(States(arguments.devices, of_host=True)):
                return False  # what draws cannot be compared
        found = [*shadows.gradients(), *[each.grad for each in leaves]]
        norms = [float(x.double().norm()) for x in found if x is not None]
        sizes.append(sum(each**2 for each in norms) ** 0.5)
        for output, _ in pulled:
            trial.eps = max(trial.eps, torch.finfo(output.dtype).eps)
            if output.device.type != "cpu":
                trial.eps = max(trial.eps, ON_DEVICE)
    return sizes[0] * 3 * trial.eps**0.5 < sizes[-1] < torch.inf


class _Held:
    """What a graph saved; it lives as long as the graph."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def _are_alive(held: Sequence[weakref.ref[Any]]) -> bool:
    for _ in range(2):
        if all(each() is None for each in held):
            return False
        gc.collect()
    return any(each() is not None for each in held)


def _is_no_place_for_hooks(error: RuntimeError) -> bool:
    """Whether functions of torch.func have refused what is added to a graph."""
    return any(word in str(error) for word in ("saved tensor hooks", "functorch"))


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _direction(value: Tensor, joint: Joint, start: int) -> Tensor:
    """A gradient that gives each row its own, whichever rows are beside it."""
    assert joint.dim is not None
    inner = value.detach().movedim(joint.dim, 0)
    places = torch.arange(value.numel(), device=value.device).view(inner.shape)
    wide = (places + start * joint.multiple * inner[0].numel()).double()
    return wide.mul(1.7).cos().movedim(0, joint.dim).to(value.dtype)
