"""What a forward pass leaves in attributes: with chunks, that of one chunk."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from trainkit.core.batch_norm.layers import listed
from trainkit.core.inside.moment import version_of

OF_TORCH = frozenset(vars(nn.Module()))
"""The attributes that each module has; buffers are looked at elsewhere."""


def held_tensors(module: nn.Module) -> dict[str, Any]:
    """Which tensors stand in plain attributes of a module and of those in it, and how
    often each was changed in place, by their path.

    A list or dict counts as what it holds. What a layer caches stays the same object
    from one pass to the next; what it leaves for others does not.
    """
    return {
        f"{path}.{name}".lstrip("."): tuple((id(x), version_of(x)) for x in value)
        for path, each in module.named_modules()
        for name, attribute in vars(each).items()
        if name not in OF_TORCH and (value := tuple(_tensors(attribute)))
    }


def moved_between(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The paths of attributes that hold other tensors than before."""
    return [path for path, tensors in after.items() if tensors != before.get(path, ())]


def announce_left(module: nn.Module, name: str, left: list[str]) -> None:
    """Warn of what each chunk overwrites or runs, so that it is not that of all rows.

    Args:
        module: which runs in chunks.
        name: of it.
        left: the attributes in which its forward leaves tensors.
    """
    root = _package(type(module))
    hooked = [p for p, each in module.named_modules() if p and _is_hooked(each, root)]
    if hooked:
        warnings.warn(
            f"trainkit | {name}: forward hooks of {listed(hooked)} run for each chunk "
            f"of rows, in the forward and in the backward pass. What they collect is "
            f"that of a chunk. A hook of {name} itself sees all rows, once.",
            stacklevel=2,
        )
    if left:
        warnings.warn(
            f"trainkit | {name}: its forward leaves tensors in {listed(left)}, which "
            f"will hold those of one chunk of rows. Return them, if the step or a log "
            f"reads them.",
            stacklevel=2,
        )


def _is_hooked(layer: nn.Module, root: str) -> bool:
    """Whether hooks stand on a layer that no package of its model has put there."""
    own = (root, _package(type(layer)))
    if isinstance(layer, FSDPModule):
        return False
    return any(_package(each) not in own for each in layer._forward_hooks.values())


def _package(value: Any) -> str:
    return str(getattr(value, "__module__", "")).split(".")[0]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        yield from (each for each in value if isinstance(each, Tensor))
    elif isinstance(value, dict):
        yield from (each for each in value.values() if isinstance(each, Tensor))
