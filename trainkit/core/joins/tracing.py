"""Tracing a module's forward, down to the modules that hold no BatchNorm layer."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd import Function
from torch.nn.modules.batchnorm import _NormBase

from trainkit.core.inside.draws import Draws, are_same, states_of_host, torch_states
from trainkit.core.inside.settings import (
    KINDS,
    OF_TORCH,
    changed,
    put_back,
    settings_of,
)
from trainkit.core.joins.net import Net
from trainkit.core.joins.program import (
    WITHOUT_GRAPH,
    Entry,
    Program,
    Splitter,
    Untraceable,
)
from trainkit.core.split.fields import take_apart


class _Proxy(fx.Proxy):
    """A value in tracing, to which `value[index] = other` may be done."""

    def __setitem__(self, index: Any, value: Any) -> None:
        given = self, index, value
        self.tracer.create_proxy("call_function", operator.setitem, given, {})


class _Tracer(fx.Tracer):
    """Goes into the modules that hold a layer of BatchNorm, and into no others.

    Args:
        entry: what is traced.
        open_: the modules that it goes into.
    """

    def __init__(self, entry: Entry, open_: Collection[nn.Module]) -> None:
        super().__init__(param_shapes_constant=True)
        self._entry, self._open = entry, open_
        self._casts = autocast_now()
        self.running: list[nn.Module] = []

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
        self.running.append(m)
        found = super().call_module(m, forward, args, kwargs)
        self.running.pop()  # where it fails, the place stays
        return found

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
        self._kind = kind

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._kind.apply(*args, **kwargs)


def traced(net: Net, values: Sequence[Any]) -> Program:
    """Split a forward at its layers of BatchNorm.

    Args:
        net: whose forward.
        values: its arguments; tensors may be others, all else must be the same.

    Raises:
        Untraceable: it cannot be traced.
    """
    open_ = _holding_layers(net)
    _refuse_hooks(net, open_)
    _refuse_computed_weights(net)
    entry = Entry(net, values)
    tracer = _Tracer(entry, {*open_, entry})
    inputs = tuple(fx.PH for v in values if isinstance(v, Tensor))  # pyright: ignore
    before, held = settings_of(net.module), _attributes(net.module)
    with _refusing_draws(net):
        try:
            with torch.enable_grad(), tracer.whole_functions():
                graph = tracer.trace(entry, concrete_args={"tensors": inputs})
        except Exception as error:
            place = net.path(tracer.running[-1]) if tracer.running else net.name
            text = str(error).split("\n")[0]
            kind = "" if isinstance(error, Untraceable) else f"{type(error).__name__}: "
            raise Untraceable(f"{place}: {kind}{text}") from error
        finally:
            moved = changed(before, settings_of(net.module))
            put_back(before, moved)
            left = _put_back_proxies(net.module, held)
    for module, name in [*moved, *left]:
        raise Untraceable(f"{net.path(module)}: its forward sets self.{name}")
    trained = [v.requires_grad for v in values if isinstance(v, Tensor)]
    return Splitter(net, entry, graph, trained).program()


def looks_of(module: nn.Module) -> tuple[Any, ...]:
    """What a module has for attributes that are functions or hold several numbers or
    words, since its forward may depend on them."""
    return tuple(
        _look(value)
        for each in module.modules()
        for name, value in vars(each).items()
        if name not in OF_TORCH and type(value) not in KINDS
    )


def _look(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return (type(value), *map(_look, value))
    if isinstance(value, dict):
        return (type(value), *((id(key), _look(one)) for key, one in value.items()))
    if isinstance(value, MethodType):
        return id(value.__func__), id(value.__self__)
    simple = value is None or type(value) in KINDS or isinstance(value, torch.dtype)
    if simple:
        return value
    is_function = isinstance(value, FunctionType | BuiltinFunctionType | Enum)
    return id(value) if is_function else type(value)


def autocast_now() -> tuple[Any, ...]:
    """Whether autocast is on, and to what type."""
    return tuple(
        (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda")
    )


@contextlib.contextmanager
def _refusing_draws(net: Net) -> Iterator[None]:
    """Refuse random numbers that are drawn in tracing, which would be constants, and
    put the generators back."""
    draws = Draws()
    draws.of_host = True
    draws.look(net.module)
    torchs, hosts = torch_states([]), states_of_host()
    own = [_state(each) for each in draws.own]
    restore = draws.keep([])
    try:
        yield
        is_moved = Draws().note(hosts) or own != [_state(each) for each in draws.own]
        if is_moved or not are_same(torchs, torch_states([])):
            raise Untraceable(
                f"{net.name}: the forward of a module that holds a layer draws random "
                f"numbers that do not depend on its arguments"
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


def _refuse_hooks(net: Net, open_: Sequence[nn.Module]) -> None:
    for each in net.module.modules():
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


def _attributes(module: nn.Module) -> dict[tuple[nn.Module, str], Any]:
    return {
        (each, name): value
        for each in module.modules()
        for name, value in vars(each).items()
    }


def _put_back_proxies(
    module: nn.Module, before: dict[tuple[nn.Module, str], Any]
) -> list[tuple[nn.Module, str]]:
    """Give attributes the values they had that hold values of the tracing."""
    found = []
    for (each, name), value in _attributes(module).items():
        if isinstance(value, fx.Proxy | tuple) and _has_proxy([value]):
            vars(each)[name] = before.get((each, name))
        elif isinstance(value, list) and _has_proxy(value):
            value[:] = [one for one in value if not _has_proxy([one])]
        elif isinstance(value, dict) and _has_proxy(value.values()):
            for key in [key for key, one in value.items() if _has_proxy([one])]:
                del value[key]
        else:
            continue
        found.append((each, name))
    return found


def _has_proxy(values: Iterable[Any]) -> bool:
    return any(
        isinstance(one, fx.Proxy) or (isinstance(one, tuple) and _has_proxy(one))
        for one in values
    )
