"""Parameters and buffers as the passes of a check need them."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.core.bare import is_a
from trainkit.lit.measure.calls import wide_for
from trainkit.lit.rerun.hidden import CACHING


@contextlib.contextmanager
def own_values(module: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Parameters and buffers in one width, and a little off from where they are.

    A zero gate hides what stands behind it, and a copy that equals its source hides
    that it moves.

    Parameters of another width are other objects: with another dtype, torch forgets
    the leaf of a parameter, and with it the hooks by which DDP averages its gradient.
    """
    generator = torch.Generator().manual_seed(1)
    parameters = [(p, p.data) for p in module.parameters()]
    plain = [m for m in module.modules() if not isinstance(m, torch.jit.ScriptModule)]
    attributes = [(vars(each), dict(vars(each))) for each in plain]
    default, sizes = torch.get_default_dtype(), _cached()
    try:
        known: dict[int, Any] = {}
        for parameter, data in parameters:
            moved = _moved(data, generator, dtype)
            if moved.dtype == data.dtype:
                parameter.data = moved
            else:
                known[id(parameter)] = _like(parameter, moved)
        if dtype is not None:
            torch.set_default_dtype(dtype)
            for held, values in attributes:
                held.update({n: _wide(v, known, dtype) for n, v in values.items()})
        if any(known.get(id(p), p) is not p for p in module.parameters()):
            raise TypeError("a TorchScript module keeps its dtype")
        yield
    finally:
        torch.set_default_dtype(default)
        for cache, (function, size) in _cached().items():
            if size > sizes.get(cache, (None, 0))[1]:
                function.cache_clear()  # it may hold constants of the wide dtype
        for parameter, data in parameters:
            parameter.data = data
        for held, values in attributes:
            held.update(values)


def _like(parameter: nn.Parameter, data: Tensor) -> Tensor:
    """Another parameter of its kind, with other data."""
    made = data.as_subclass(type(parameter))
    vars(made).update(vars(parameter))
    return made.requires_grad_(parameter.requires_grad)


def _wide(value: Any, known: dict[int, Any], dtype: torch.dtype) -> Any:
    """What stands in for an attribute; it has the wide copies of tensors."""
    if is_a(value, Tensor):
        return known.setdefault(id(value), widened(value, dtype))
    kind, entries = type(value), value
    if kind is dict:  # such as those of a module's parameters and buffers
        entries = value.values()
    elif kind not in (list, tuple):
        return value
    if not any(is_a(each, Tensor) for each in entries):
        return value
    wide = [_wide(each, known, dtype) for each in entries]
    return kind(zip(value, wide, strict=True) if kind is dict else wide)


def _cached() -> dict[int, tuple[Any, int]]:
    """The functions of the user's code that cache results, and how many they hold."""
    return {
        id(each): (each, each.cache_info().currsize)
        for each in gc.get_objects()
        if type(each) is CACHING
        and str(each.__module__).split(".")[0] not in ("torch", "lightning", "numpy")
    }


def _moved(
    data: Tensor, generator: torch.Generator, dtype: torch.dtype | None
) -> Tensor:
    if not data.is_floating_point():
        return data if dtype is None else widened(data, dtype)
    wide = data.double()
    spread = float(wide.std()) if wide.numel() > 1 else 0.0
    noise = torch.randn(wide.shape, generator=generator, dtype=torch.float64)
    # Rounded as the run's own value is, so that each arithmetic begins there.
    moved = (wide + (0.05 * spread or 0.02) * noise.to(wide)).to(data.dtype)
    return moved if dtype is None else widened(moved, dtype)


def widened(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(wide_for(tensor.dtype, dtype) or tensor.dtype)
