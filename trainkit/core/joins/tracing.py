"""Tracing a module's forward, down to the modules that hold no BatchNorm layer."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import (
    Callable,
    Collection,
    Hashable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd import Function
from torch.nn.modules.batchnorm import _NormBase

from trainkit.core._compat import has_hooks_for_all, uncached_weights
from trainkit.core.inside.moment import changed, put_back, settings_of
from trainkit.core.joins.constants import Constants
from trainkit.core.joins.draws import Draws, are_same, states_of_host, torch_states
from trainkit.core.joins.layers import devices_of
from trainkit.core.joins.net import Net
from trainkit.core.joins.program import Entry, Program, Splitter, Untraceable
from trainkit.core.joins.proxies import BeforeTracing
from trainkit.core.joins.sameness import WITHOUT_GRAPH, operations
from trainkit.core.nested import take_apart


class _Proxy(fx.Proxy):
    """A value in tracing, to which `value[index] = other` may be done."""

    def __setitem__(self, index: Any, value: Any) -> None:
        given = self, index, value
        self.tracer.create_proxy("call_function", operator.setitem, given, {})


class _Buffer(_Proxy):
    """A buffer in tracing. Its values are those of each run; what it is like is known.

    Args:
        node: reads it.
        tracer: of the node.
        value: the buffer at present.
    """

    def __init__(self, node: fx.Node, tracer: fx.Tracer, value: Tensor) -> None:
        super().__init__(node, tracer)
        self._value = value

    shape = property(lambda self: self._value.shape)
    ndim = property(lambda self: self._value.ndim)
    dtype = property(lambda self: self._value.dtype)
    device = property(lambda self: self._value.device)

    def size(self, *dim: int) -> Any:
        return self._value.size(*dim)

    def dim(self) -> int:
        return self._value.dim()

    def numel(self) -> int:
        return self._value.numel()

    def __len__(self) -> int:
        return len(self._value)


class _Tracer(fx.Tracer):
    """Goes into the modules that hold a layer of BatchNorm, and into no others.

    Args:
        entry: what is traced.
        open_: the modules that it goes into.
    """

    def __init__(self, entry: Entry, open_: Collection[nn.Module]) -> None:
        super().__init__(param_shapes_constant=True)
        self._entry, self._open = entry, open_
        self._casts, self._thread = autocast_now(), get_ident()
        self.running: list[nn.Module] = []

    @property
    def _is_elsewhere(self) -> bool:
        """Whether another thread calls, which tracing is not to disturb."""
        return get_ident() != self._thread

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return m not in self._open

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if self._casts != autocast_now():
            raise Untraceable("it changes autocast for a part of itself")
        if torch.is_inference_mode_enabled():
            raise Untraceable("it runs a part in inference mode")
        node = super().create_node(*args, **kwargs)
        node.meta[WITHOUT_GRAPH] = not torch.is_grad_enabled()
        return node

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        if self._is_elsewhere:
            return forward(*args, **kwargs)
        self.running.append(m)
        found = super().call_module(m, forward, args, kwargs)
        self.running.pop()  # where it fails, the place stays
        return found

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: Any) -> Any:
        if self._is_elsewhere:
            return attr_val
        if isinstance(attr_val, Tensor) and not isinstance(attr_val, nn.Parameter):
            for name, value in self.root.named_buffers():
                if value is attr_val:
                    return self._buffer(name, value, parameter_proxy_cache)
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def _buffer(self, name: str, value: Tensor, cache: dict[str, Any]) -> Any:
        if name not in cache:
            cache[name] = self.create_proxy(
                "get_attr",
                name,
                (),
                {},
                proxy_factory_fn=lambda node: _Buffer(node, self, value),
            )
        return cache[name]

    @contextlib.contextmanager
    def whole_functions(self) -> Iterator[None]:
        """Within it, an autograd function stays what it is: its backward is its own."""
        tracer, before = self, vars(Function)["apply"]

        def apply(kind: Any, *args: Any, **kwargs: Any) -> Any:
            given = [field.value for field in take_apart((args, kwargs))[0]]
            if not any(isinstance(value, fx.Proxy) for value in given):
                return before.__get__(None, kind)(*args, **kwargs)
            functions = tracer._entry.functions
            functions.append(_Apply(kind))
            name = f"functions.{len(functions) - 1}"
            return tracer.create_proxy("call_module", name, args, kwargs)

        Function.apply = classmethod(apply)  # type: ignore[assignment]
        try:
            yield
        finally:
            Function.apply = before


class _Apply(nn.Module):
    """Applies an autograd function."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.applied = kind

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.applied.apply(*args, **kwargs)


@dataclass
class Trace:
    """A forward as operations that are not split yet.

    Attributes:
        tensors: what stands for each tensor that is no argument, by name.
        trained: whether each argument that is a tensor trains.
    """

    net: Net
    entry: Entry
    graph: fx.Graph
    tensors: Mapping[str, Hashable]
    trained: list[bool]

    def sameness(self) -> Hashable:
        """Equal for traces of the same operations."""
        modules = dict(self.entry.named_modules())
        return self.tensors[""], operations(self.graph, modules, self.tensors)

    def program(self) -> Program:
        """The forward, split at its layers of BatchNorm."""
        return Splitter(self.net, self.entry, self.graph, self.trained).program()


def traced(net: Net, arguments: Sequence[Sequence[Any]]) -> Trace:
    """The operations of a forward.

    Args:
        net: whose forward.
        arguments: of each micro-batch; all that is no tensor is the same.

    Raises:
        Untraceable: it cannot be traced, or not be split.
    """
    open_ = _holding_layers(net)
    refuse_hooks(net, open_)
    _refuse_computed_weights(net)
    values = arguments[0]
    entry, constants = Entry(net, values), Constants()
    tracer = _Tracer(entry, {*open_, entry})
    inputs = tuple(fx.PH for v in values if isinstance(v, Tensor))  # pyright: ignore
    before, held = settings_of(net.module), BeforeTracing(open_)
    graph, tensors = fx.Graph(), {}
    failed: Exception | None = None
    try:
        with _refusing_draws(net, values), uncached_weights():
            with constants, tracer.whole_functions():
                graph = tracer.trace(entry, concrete_args={"tensors": inputs})
            tensors = constants.tensors(graph, entry)
    except Exception as error:
        failed = error
    finally:
        entry.forget()
        moved = changed(before, settings_of(net.module))
        put_back(before, moved)
        left = held.put_back()
    for module, name in [*moved, *left]:
        raise Untraceable(f"{net.path(module)}: its forward sets self.{name}")
    if failed is not None:
        place = net.path(tracer.running[-1]) if tracer.running else net.name
        text = str(failed).split("\n")[0]
        is_own = isinstance(failed, Untraceable)
        kind = "" if is_own else f"{type(failed).__name__}: "
        raise Untraceable(f"{place}: {kind}{text}") from failed
    by_argument = zip(*arguments, strict=True)
    trained = [
        any(each.requires_grad for each in several)
        for several in by_argument
        if isinstance(several[0], Tensor)
    ]
    return Trace(net, entry, graph, tensors, trained)


def autocast_now() -> tuple[Any, ...]:
    """Whether autocast is on, and to what type."""
    return tuple(
        (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda")
    )


@contextlib.contextmanager
def _refusing_draws(net: Net, values: Sequence[Any]) -> Iterator[None]:
    """Refuse random numbers that are drawn in tracing, which would be constants, and
    put the generators back."""
    draws = Draws()
    draws.of_host = True
    draws.look(net.module)
    devices = devices_of(values)
    torchs, hosts = torch_states(devices), states_of_host()
    own = [_state(each) for each in draws.own]
    restore = draws.keep(devices)
    try:
        yield
        is_moved = Draws().note(hosts) or own != [_state(each) for each in draws.own]
        if is_moved or not are_same(torchs, torch_states(devices)):
            raise Untraceable(
                "the forward of a module that holds a layer draws random numbers that "
                "do not depend on its arguments"
            )
    finally:
        restore()


def _state(generator: Any) -> str:
    if isinstance(generator, torch.Generator):
        return repr(generator.get_state().tolist())
    has_bits = hasattr(generator, "bit_generator")
    return repr(generator.bit_generator.state if has_bits else generator.get_state())


def _holding_layers(net: Net) -> list[nn.Module]:
    """The modules that hold a layer that is joined."""
    joined = net.layers
    return [
        each
        for each in net.module.modules()
        if each not in joined and any(inner in joined for inner in each.modules())
    ]


def refuse_hooks(net: Net, open_: Collection[nn.Module]) -> None:
    """Refuse what would not run, or not as it does in one graph."""
    if has_hooks_for_all():
        raise Untraceable("hooks are registered for all modules")
    for each in net.module.modules():
        is_leaf = each is not net.module and each not in open_
        if is_leaf and each not in net.layers and each._forward_hooks:
            raise Untraceable(
                f"{net.path(each)}: it has forward hooks, which would get outputs "
                f"without a graph"
            )
        is_other = isinstance(each, _NormBase) and each not in net.layers
        if is_other and each.training and each.track_running_stats:
            place = net.path(each)
            raise Untraceable(f"{place}: it moves its own running statistics")
    for each in [*open_, *net.layers]:
        hooks = (
            each._forward_hooks,
            each._forward_pre_hooks,
            each._backward_hooks,
            each._backward_pre_hooks,
        )
        if each is not net.module and any(hooks):
            raise Untraceable(f"{net.path(each)}: it has hooks, which would not run")
        if isinstance(each, torch.jit.ScriptModule) or hasattr(each, "_orig_mod"):
            raise Untraceable(f"{net.path(each)}: it is compiled")


def _refuse_computed_weights(net: Net) -> None:
    for layer in net.layers:
        for weight in (layer.weight, layer.bias):
            if weight is not None and not isinstance(weight, nn.Parameter):
                raise Untraceable(
                    f"{net.path(layer)}: its weight or bias is no parameter, but is "
                    f"computed from others"
                )
