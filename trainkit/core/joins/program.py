"""A module's forward as segments between its BatchNorm layers, traced by torch.fx."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn

from trainkit.core.batch_norm.layers import BatchNorm
from trainkit.core.joins.net import Net
from trainkit.core.joins.sameness import WITHOUT_GRAPH
from trainkit.core.nested import Build, take_apart


@dataclass(frozen=True)
class Constant:
    """A leaf of an output that is the same for all arguments."""

    value: Any


class Untraceable(Exception):
    """A forward cannot be split at its layers; the text says where and why."""


@dataclass(frozen=True)
class Join:
    """A call of a BatchNorm layer, at the end of a segment.

    Attributes:
        layer: which is called.
        name: of the layer.
        value: the name of what it normalises.
    """

    layer: BatchNorm
    name: str
    value: str


class Values(Protocol):
    """Values by name."""

    def get(self, name: str) -> Any: ...


@dataclass
class Segment:
    """What runs between two joins.

    Attributes:
        graph: the operations; its arguments are `inputs`, then the layers' `joins`.
        inputs: the names of values from earlier segments.
        joins: the numbers of the calls whose normalising it begins with.
        outputs: the names of values that later segments need, a layer, or the caller.
        end: the call of a layer that follows; None behind the last.
        parameters: those of the module that it uses.
    """

    graph: fx.GraphModule
    inputs: list[str]
    joins: list[int]
    outputs: list[str]
    end: Join | None
    parameters: list[nn.Parameter]
    trains: bool


@dataclass
class Program:
    """A forward in segments.

    Attributes:
        segments: in order.
        arguments: the names of the arguments that are tensors.
        results: the names of the leaves of the output, or constants.
        build: makes the output of its leaves.
        trains: the names of values that may have a gradient.
        constants: the tensors that it reads, but for the module's own parameters and
            buffers.
        is_proven: whether it has run, and was compared with the module itself.
        written: the segments and names of inputs that they change in place.
    """

    segments: list[Segment]
    arguments: list[str]
    results: list[Any]
    build: Build
    trains: set[str]
    constants: list[Tensor] = field(default_factory=list)
    is_proven: bool = False
    written: set[tuple[int, str]] = field(default_factory=set)

    def by_name(self, values: Sequence[Any]) -> dict[str, Tensor]:
        """The arguments that are tensors, by their names."""
        tensors = [value for value in values if isinstance(value, Tensor)]
        return dict(zip(self.arguments, tensors, strict=True))

    def in_order(
        self, values: Sequence[Any], found: Mapping[str, Tensor | None]
    ) -> list[Tensor | None]:
        """What was found for the arguments, one for each."""
        names = iter(self.arguments)
        are = [isinstance(value, Tensor) for value in values]
        return [found.get(next(names)) if is_tensor else None for is_tensor in are]

    def leaves(self, waiting: Values) -> list[Any]:
        """The leaves of the output, in order."""
        return [
            each.value if isinstance(each, Constant) else waiting.get(each)
            for each in self.results
        ]

    @property
    def given_back(self) -> set[str]:
        """The names of the values that the caller gets."""
        return {name for name in self.results if not isinstance(name, Constant)}

    def last_used(self, number: int) -> set[str]:
        """The inputs of a segment that no later one gets, and not the caller."""
        later = {name for each in self.segments[number + 1 :] for name in each.inputs}
        return {*self.segments[number].inputs} - later - self.given_back

    def may_write(self, number: int, name: str) -> bool:
        """Whether a segment may change one of its inputs in place."""
        return not self.is_proven or (number, name) in self.written


class Entry(nn.Module):
    """Calls a module's own forward with the tensors among its arguments."""

    def __init__(self, net: Net, values: Sequence[Any]) -> None:
        super().__init__()
        self.net = net.module
        self._run: Any = net.run
        self._values = values
        self.build: Build
        self.functions = nn.ModuleList()

    def forward(self, tensors: Any) -> Any:
        each = iter(tensors)
        values = [next(each) if isinstance(v, Tensor) else v for v in self._values]
        leaves, self.build = take_apart(self._run(values))
        return tuple(leaf.value for leaf in leaves)

    def forget(self) -> None:
        """Let go of the arguments, which a trace would keep."""
        self._run, self._values = None, []


class Splitter:
    """Cuts a traced graph at the calls of layers.

    A layer's normalising runs where its result is first used, so that what waits over
    a cut is what came to the layer, and not its result as well.
    """

    def __init__(
        self, net: Net, entry: Entry, graph: fx.Graph, trained: list[bool]
    ) -> None:
        self._net, self._entry = net, entry
        self._modules = dict(entry.named_modules())
        self._nodes = list(graph.nodes)
        self._joins = [node for node in self._nodes if self._is_join(node)]
        self._output = self._nodes[-1]
        self._place = self._places()
        given = [node for node in self._nodes if node.op == "placeholder"]
        self._given = dict(zip(given, trained, strict=True))
        self._trains: set[fx.Node] = set()

    def program(self) -> Program:
        """The segments."""
        for node in self._nodes:
            if self._has_gradient(node):
                self._trains.add(node)
        leaves: Any = self._output.args[0]
        if any(isinstance(x, fx.Node) and x.op == "get_attr" for x in leaves):
            raise Untraceable(f"{self._net.name}: it returns a weight or buffer")
        return Program(
            segments=[self._segment(n) for n in range(len(self._joins) + 1)],
            arguments=[node.name for node in self._given],
            results=[x.name if isinstance(x, fx.Node) else Constant(x) for x in leaves],
            build=self._entry.build,
            trains={node.name for node in self._trains},
            constants=self._constants(),
        )

    def _constants(self) -> list[Tensor]:
        own = {id(x) for x in (*self._entry.parameters(), *self._entry.buffers())}
        names = {str(node.target) for node in self._nodes if node.op == "get_attr"}
        found = [attribute(self._entry, name) for name in sorted(names)]
        return [x for x in found if isinstance(x, Tensor) and id(x) not in own]

    def _is_join(self, node: fx.Node) -> bool:
        if node.op != "call_module":
            return False
        layer = self._modules[str(node.target)]
        if layer not in self._net.layers:
            return False
        values = [*node.args, *node.kwargs.values()]
        if len(values) != 1 or not isinstance(values[0], fx.Node):
            raise Untraceable(f"{self._net.layers[layer]}: it must get one tensor")
        return True

    def _places(self) -> dict[fx.Node, int]:
        """The segment in which each operation runs."""
        places, number = {}, 0
        for node in self._nodes:
            places[node] = number
            if _takes_an_item(node) and node.args[0] not in self._joins:
                places[node] = places[node.args[0]]  # tensors cross, tuples do not
            number += node in self._joins
        called = {node: places[node] for node in self._joins}
        for node in self._joins:
            users = [called.get(user, places[user]) for user in node.users]
            places[node] = min(users, default=len(self._joins))
        return places

    def _has_gradient(self, node: fx.Node) -> bool:
        if node.op == "placeholder":
            return self._given[node]
        if node.meta.get(WITHOUT_GRAPH):
            return False
        own: Any = ()
        if node.op == "call_module":
            own = self._modules[str(node.target)].parameters()
        elif node.op == "get_attr":
            own = [attribute(self._entry, str(node.target))]
        if any(isinstance(p, Tensor) and p.requires_grad for p in own):
            return True
        return any(each in self._trains for each in node.all_input_nodes)

    def _segment(self, number: int) -> Segment:
        own = [
            node
            for node in self._nodes
            if self._place[node] == number
            and node.op not in ("placeholder", "get_attr", "output")
        ]
        graph, known = fx.Graph(), {}
        used = [each for node in own for each in node.all_input_nodes]
        inputs = [x for x in dict.fromkeys(used) if x.op != "get_attr" and x not in own]
        joins = [node for node in own if node in self._joins]
        for node in inputs:
            known[node] = graph.placeholder(node.name)
        normals = [graph.placeholder(f"normal_{j.name}") for j in joins]
        paused: list[fx.Node] = []
        for node in own:
            if bool(paused) != bool(node.meta.get(WITHOUT_GRAPH)):
                if paused:
                    graph.call_function(_resume_gradients, (paused.pop(),))
                else:
                    paused.append(graph.call_function(_pause_gradients))
            for each in node.all_input_nodes:
                if each.op == "get_attr" and each not in known:
                    known[each] = graph.node_copy(each)
            if node in joins:
                x = known[node.all_input_nodes[0]]
                arguments = normals[joins.index(node)], x
                known[node] = graph.call_function(_normalised, arguments)
            else:
                known[node] = graph.node_copy(node, known.__getitem__)
        for before in paused:
            graph.call_function(_resume_gradients, (before,))
        is_last = number == len(self._joins)
        end = None if is_last else self._joins[number]
        outputs = [node for node in own if self._is_needed(node, number)]
        parameters = self._parameters(own, known)
        graph.output(tuple(known[node] for node in outputs))
        return Segment(
            graph=fx.GraphModule(self._entry, graph),
            inputs=[node.name for node in inputs],
            joins=[self._joins.index(node) for node in joins],
            outputs=[node.name for node in outputs],
            end=None if end is None else self._join(end),
            parameters=parameters,
            trains=bool(parameters) or any(map(self._has_weights, joins)),
        )

    def _is_needed(self, node: fx.Node, number: int) -> bool:
        """Whether a value comes to a layer, or is used behind the segment."""
        users = {*node.users}
        if self._output in users or not users.isdisjoint(self._joins):
            return True
        return any(self._place[user] > number for user in users)

    def _has_weights(self, join: fx.Node) -> bool:
        """Whether a layer has weights that train."""
        layer = self._modules[str(join.target)]
        return any(each.requires_grad for each in layer.parameters())

    def _join(self, node: fx.Node) -> Join:
        layer: Any = self._modules[str(node.target)]
        return Join(layer, self._net.layers[layer], node.all_input_nodes[0].name)

    def _parameters(
        self, own: Sequence[fx.Node], known: Collection[fx.Node]
    ) -> list[nn.Parameter]:
        """The parameters that train in some operations, but for those of joins."""
        found: dict[int, nn.Parameter] = {}
        for node in own:
            if node.op == "call_module" and node not in self._joins:
                module = self._modules[str(node.target)]
                found |= {id(p): p for p in module.parameters() if p.requires_grad}
        for node in known:
            if node.op == "get_attr":
                value = attribute(self._entry, str(node.target))
                if isinstance(value, nn.Parameter) and value.requires_grad:
                    found[id(value)] = value
        return list(found.values())


def _takes_an_item(node: fx.Node) -> bool:
    if node.target is not operator.getitem:
        return False
    return isinstance(node.args[0], fx.Node) and isinstance(node.args[1], int)


def _pause_gradients() -> bool:
    was_on = torch.is_grad_enabled()
    torch.set_grad_enabled(False)
    return was_on


def _resume_gradients(was_on: bool) -> None:
    torch.set_grad_enabled(was_on)


def _normalised(normal: Any, x: Tensor) -> Tensor:
    return normal(x)


def attribute(root: Any, path: str) -> Any:
    """What stands at a path of attributes."""
    for name in path.split("."):
        root = getattr(root, name)
    return root
