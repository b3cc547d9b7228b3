"""What a forward pass leaves in attributes: with chunks, that of one chunk."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from trainkit.core.batch_norm.layers import listed
from trainkit.core.inside.moment import version_of
from trainkit.core.inside.settings import OF_TORCH
from trainkit.core.split.fields import is_array


def held_tensors(module: nn.Module) -> dict[str, Any]:
    """Which tensors stand in plain attributes of a module and of those in it, and how
    often each was changed in place, by their path.

    A list or dict counts as what it holds, an array of NumPy as its entries. What a
    layer caches stays the same object from one pass to the next; what it leaves for
    others does not.
    """
    return {
        f"{path}.{name}".lstrip("."): tuple(map(_identity, value))
        for path, each in module.named_modules()
        for name, attribute in vars(each).items()
        if name not in OF_TORCH and (value := tuple(_tensors(attribute)))
    }


def moved_between(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The paths of attributes that hold other tensors than before."""
    return [path for path, tensors in after.items() if tensors != before.get(path, ())]


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
            f"{listed(drawn)}. Each chunk of rows draws its own: what they decide, "
            f"such as a layer that is left out, is decided for each chunk. Draw them "
            f"before it, and pass them; or name modules within it."
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


def _tensors(value: Any) -> Iterator[Any]:
    if isinstance(value, Tensor) or is_array(value):
        yield value
    elif isinstance(value, list | tuple):
        yield from (each for each in value if isinstance(each, Tensor))
    elif isinstance(value, dict):
        yield from (each for each in value.values() if isinstance(each, Tensor))


def _identity(value: Any) -> tuple[int, int]:
    if isinstance(value, Tensor):
        return id(value), version_of(value)
    return 0, hash(value.tobytes())
