"""Tensors of a forward that are the same for all micro-batches."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from trainkit.core.joins.program import Untraceable, attribute
from trainkit.core.joins.sameness import Is, frozen, leaves_of, tensors_in

OPERATORS = (
    "iadd iand ifloordiv ilshift imatmul imod imul ior ipow irshift isub itruediv ixor "
    "setitem"
).split()
IN_PLACE = frozenset({"__set__", *OPERATORS, *(f"__{each}__" for each in OPERATORS)})
"""The names of operations that change their first argument."""


class Constants(TorchFunctionMode):
    """Within it, tensors are noted that are made of numbers alone, and how.

    What is computed from tensors that were there before is noted as well: as a constant
    it would not follow them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[Hashable] = []
        self._made: dict[int, tuple[Any, int]] = {}
        self._computed: dict[int, tuple[Any, str]] = {}
        self._all_by = ""
        self._own: set[int] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        given = leaves_of([args, kwargs])
        if any(isinstance(each, fx.Proxy) for each in given):
            return func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        others = [x for x in tensors_in(given) if id(x) not in self._made]
        target = changed_by(name, args, kwargs)
        if target is not None and others:
            if any(target is each for each in others):
                raise Untraceable(f"{name} changes a tensor that is no argument")
            self._all_by = name  # views of the target may be anywhere
        found = func(*args, **kwargs)
        new = [x for x in tensors_in(found) if not any(x is each for each in others)]
        for each in new:
            if others:
                self._computed[id(each)] = each, name
            else:
                self._made.setdefault(id(each), (each, len(self._made)))
        if not others and (new or target is not None):
            looks = tuple((x.shape, x.dtype, str(x.device)) for x in new)
            self._calls.append((func, frozen([args, kwargs], self._number), looks))
        return found

    def _number(self, value: Any) -> Hashable:
        return self._made[id(value)][1] if id(value) in self._made else Is(value)

    def tensors(self, graph: fx.Graph, root: Any) -> dict[str, Hashable]:
        """What stands for each tensor that a graph reads, by its name.

        Raises:
            Untraceable: one of them is changed, or was computed in tracing.
        """
        fixed: set[fx.Node] = set()
        for node in graph.nodes:
            name = getattr(node.target, "__name__", node.target)
            target = changed_by(str(name), node.args, node.kwargs)
            if isinstance(target, fx.Node) and target in fixed:
                raise Untraceable(f"{name} changes a tensor that is no argument")
            if node.op == "get_attr" or (
                node.all_input_nodes and fixed.issuperset(node.all_input_nodes)
            ):
                fixed.add(node)
        self._own = set(map(id, root.parameters()))
        names = [str(node.target) for node in graph.nodes if node.op == "get_attr"]
        found = {name: self._look(name, attribute(root, name)) for name in names}
        return {**found, "": tuple(self._calls)}

    def _look(self, name: str, value: Any) -> Hashable:
        if not isinstance(value, Tensor):
            raise Untraceable(f"{name.removeprefix('net.')} is given to a function")
        _, why = self._computed.get(id(value), (None, ""))
        if id(value) in self._made:
            why = why or self._all_by
        if why:
            raise Untraceable(
                f"{why} computes a tensor of others that are no arguments, and neither "
                f"parameters nor buffers that are read as attributes"
            )
        if value.requires_grad and id(value) not in self._own:
            raise Untraceable("it uses a tensor that trains, and is no parameter of it")
        return self._number(value)


def changed_by(name: str, args: Any, kwargs: Any) -> Any:
    """What an operation changes in place; None if nothing.

    >>> changed_by("add_", ["x", 1], {}), changed_by("add", ["x", 1], {"out": "y"})
    ('x', 'y')
    >>> changed_by("add", ["x", 1], {})
    """
    if kwargs.get("out") is not None:
        return kwargs["out"]
    name = name.partition(".")[0]
    ends = name.endswith("_") and not name.endswith("__")
    is_in_place = ends or name in IN_PLACE or kwargs.get("inplace") is True
    return args[0] if args and is_in_place else None
