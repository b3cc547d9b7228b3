"""Operations on gradients in place: dividing them, adding them up over ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainkit.core.ranks import Ranks
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


BUCKET = 2**24
"""How many elements are added up in one message, which needs a copy of them."""


@torch.no_grad()
def sum_over_ranks_(
    parameters: Iterable[Tensor], ranks: Ranks, *, times: float = 1.0
) -> None:
    """Add up gradients over ranks, where no backend does.

    A parameter that has a gradient on some ranks gets the sum on all of them. Without
    a gradient on any rank it keeps None, so that its optimizer state does not move.

    Args:
        parameters: whose gradients.
        ranks: the ranks to add up over.
        times: what to multiply the sums by.
    """
    alike: dict[Any, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.requires_grad:
            alike[parameter.device, parameter.dtype].append(parameter)
    for members in alike.values():
        for bucket in _buckets(members):
            _sum_bucket_(bucket, ranks, times)


def _sum_bucket_(members: list[Tensor], ranks: Ranks, times: float) -> None:
    present = [p.grad is not None for p in members]
    flat = [
        torch.zeros_like(p).flatten() if p.grad is None else _dense(p.grad)
        for p in members
    ]
    marks = flat[0].new_tensor(present)
    total = ranks.sum_(torch.cat([*flat, marks]))
    values, counts = total[: -len(members)], total[-len(members) :]
    # Only a rank that lacks a gradient has to know whether another has it.
    used = [True] * len(members) if all(present) else (counts > 0).tolist()
    if times != 1:
        values.mul_(times)
    sums = values.split([p.numel() for p in members])
    for parameter, total_of_it, is_used in zip(members, sums, used, strict=True):
        if is_used:
            _assign(parameter, total_of_it.view_as(parameter))


def _buckets(members: list[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    size = 0
    for parameter in members:
        bucket.append(parameter)
        size += parameter.numel()
        if size >= BUCKET:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket


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


def _dense(gradient: Tensor) -> Tensor:
    return (gradient.to_dense() if gradient.is_sparse else gradient).flatten()


def _assign(parameter: Tensor, whole: Tensor) -> None:
    if parameter.grad is None or parameter.grad.is_sparse:
        parameter.grad = whole.clone()
    else:
        parameter.grad.copy_(whole)
