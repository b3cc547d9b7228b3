"""What a forward pass leaves in attributes: with chunks, that of one chunk."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from trainkit.core.batch_norm.layers import listed
from trainkit.core.inside.moment import version_of
from trainkit.core.inside.settings import KINDS, OF_TORCH
from trainkit.core.nested import is_array


def held_values(module: nn.Module) -> dict[str, Any]:
    """What stands in plain attributes of a module and of those in it, by path: tensors,
    with how often each was changed in place, arrays, numbers and words.

    A list or dict counts as what it holds. What a layer caches stays the same object
    from one pass to the next; what it leaves for others does not.
    """
    return {
        f"{path}.{name}".lstrip("."): value
        for path, each in module.named_modules()
        for name, attribute in vars(each).items()
        if name not in OF_TORCH and (value := tuple(map(_identity, _in(attribute))))
    }


def moved_between(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    """The paths of attributes that hold other values than before."""
    return {path for path, value in after.items() if value != before.get(path, ())}


def announcements(
    module: nn.Module,
    name: str,
    left: list[str],
    drawn: list[str],
    written: list[str],
) -> Iterator[str]:
    """What each chunk overwrites, runs or draws, so that it is not that of all rows.

    Args:
        module: which runs in chunks.
        name: of it.
        left: the attributes in which its forward leaves values.
        drawn: what it draws at random once for all rows.
        written: what its forward puts into its arguments.
    """
    root = _package(type(module))
    hooked = [p for p, each in module.named_modules() if p and _is_hooked(each, root)]
    if hooked:
        yield (
            f"hooks of {listed(hooked)} run for each chunk of rows, in the forward and "
            f"in the backward pass. What they collect is that of a chunk. A hook of "
            f"{name} itself sees all rows, once."
        )
    if left:
        yield (
            f"its forward leaves values in {listed(left)}, which will hold those of "
            f"one chunk of rows, or count chunks. Return them, if the step or a log "
            f"reads them."
        )
    if written:
        yield (
            f"its forward puts values into its arguments, {listed(written)}, of which "
            f"each chunk of rows gets a copy, so that the step does not see them. "
            f"Return them."
        )
    if drawn:
        yield (
            f"its forward draws random numbers that do not belong to a row: "
            f"{listed(drawn)}. All rows of a batch would share them, as with LayerDrop "
            f"or dropout on a table, and each chunk of rows draws its own. Where that "
            f"matters, draw them before it, or name modules within it."
        )


def num_hooks(module: nn.Module) -> int:
    """How many hooks stand on layers within a module."""
    return sum(
        len(each._forward_hooks)
        + len(each._forward_pre_hooks)
        + len(each._backward_hooks)
        + len(each._backward_pre_hooks)
        for each in module.modules()
    )


def _is_hooked(layer: nn.Module, root: str) -> bool:
    """Whether hooks stand on a layer that no package of its model has put there."""
    own = (root, _package(type(layer)))
    if isinstance(layer, FSDPModule):
        return False
    if layer._backward_hooks or layer._backward_pre_hooks:
        return True
    hooks = [*layer._forward_hooks.values(), *layer._forward_pre_hooks.values()]
    return any(_package(each) not in own for each in hooks)


def _package(value: Any) -> str:
    return str(getattr(value, "__module__", "")).split(".")[0]


def _in(value: Any) -> Iterator[Any]:
    """A value, or what a list or dict holds, of what can be compared."""
    held = [value]
    if isinstance(value, list | tuple):
        held = list(value)
    elif isinstance(value, dict):
        held = list(value.values())
    yield from (
        each
        for each in held
        if isinstance(each, Tensor) or type(each) in KINDS or is_array(each)
    )


def _identity(value: Any) -> Any:
    if isinstance(value, Tensor):
        return id(value), version_of(value)
    return value if type(value) in KINDS else hash(value.tobytes())
