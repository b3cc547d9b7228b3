"""What two traces of a forward share if they run the same operations."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

WITHOUT_GRAPH = "without_graph"
"""Marks operations that ran under `no_grad`."""

BY_VALUE = (bool, int, str, bytes, type(None))
BY_TEXT = (float, complex, torch.device, range)


class Is:
    """Equal only to what holds the same object, which it keeps alive.

    >>> one = [1]
    >>> Is(one) == Is(one), Is(one) == Is([1])
    (True, False)
    """

    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held

    def __hash__(self) -> int:
        return id(self.held)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Is) and self.held is other.held


def frozen(value: Any, known: Callable[[Any], Any] = Is) -> Hashable:
    """A value as something that can be compared: numbers and words by value, also
    within lists and arrays; all else is what `known` makes of it.

    >>> frozen([1, 2.0]) == frozen([1, 2.0]), frozen(1) == frozen(1.0)
    (True, False)
    >>> frozen([1, 2]) == frozen((1, 2))
    False
    >>> frozen(float("nan")) == frozen(float("nan"))
    True
    """
    own = type(value)
    if own in BY_VALUE:
        return own, value
    if own in BY_TEXT:
        return own, repr(value)
    if isinstance(value, list | tuple):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return kind, tuple(frozen(each, known) for each in value)
    if isinstance(value, dict):
        pairs = value.items()
        return "dict", tuple((frozen(k), frozen(each, known)) for k, each in pairs)
    if isinstance(value, slice):
        return "slice", frozen([value.start, value.stop, value.step], known)
    if not getattr(getattr(value, "dtype", None), "hasobject", True):
        return "array", repr(value.dtype), value.shape, value.tobytes()  # NumPy's
    return known(value)


def operations(
    graph: fx.Graph, modules: Mapping[str, Any], tensors: Mapping[str, Hashable]
) -> tuple[Hashable, ...]:
    """The operations of a graph with all that is fixed in them.

    Args:
        graph: of a forward.
        modules: what is called, by name.
        tensors: what stands for each tensor that is no argument, by name.
    """
    number: dict[fx.Node, int] = {}

    def known(value: Any) -> Hashable:
        return number[value] if isinstance(value, fx.Node) else Is(value)

    found = []
    for node in graph.nodes:
        target: Any = Is(node.target)
        if node.op in ("call_method", "placeholder", "output"):
            target = node.target
        elif node.op == "call_module":
            module = modules[str(node.target)]
            target = Is(getattr(module, "applied", module))
        elif node.op == "get_attr":
            target = tensors[str(node.target)]
        arguments = frozen(node.args, known), frozen(node.kwargs, known)
        found.append((node.op, target, bool(node.meta.get(WITHOUT_GRAPH)), arguments))
        number[node] = len(number)
    return tuple(found)


def leaves_of(value: Any) -> list[Any]:
    """What nested lists and dicts hold."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [leaf for each in value for leaf in leaves_of(each)]
    return [value]


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in nested lists and dicts."""
    return [each for each in leaves_of(value) if isinstance(each, Tensor)]
