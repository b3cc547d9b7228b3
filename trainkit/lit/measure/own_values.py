"""Parameters and buffers as the passes of a check need them."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.lit.measure.calls import wide_for

CACHING = type(functools.lru_cache(len))


@contextlib.contextmanager
def own_values(module: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Parameters and buffers in one width, and a little off from where they are.

    A zero gate hides what stands behind it, and a copy that equals its source hides
    that it moves.
    """
    generator = torch.Generator().manual_seed(1)
    parameters = [(p, p.data) for p in module.parameters()]
    plain = [m for m in module.modules() if not isinstance(m, torch.jit.ScriptModule)]
    buffers = [(each, dict(each._buffers)) for each in plain]
    attributes = [(each, dict(vars(each))) for each in plain]
    default, sizes = torch.get_default_dtype(), _cached()
    try:
        for parameter, data in parameters:
            parameter.data = _moved(data, generator, dtype)
        if dtype is not None:
            torch.set_default_dtype(dtype)
            _widen(buffers, dtype)
            _widen(attributes, dtype)
        yield
    finally:
        torch.set_default_dtype(default)
        for cache, (function, size) in _cached().items():
            if size > sizes.get(cache, (None, 0))[1]:
                function.cache_clear()  # it may hold constants of the wide dtype
        for parameter, data in parameters:
            parameter.data = data
        for each, held in buffers:
            each._buffers.update(held)
        for each, held in attributes:
            vars(each).update(held)


def _cached() -> dict[int, tuple[Any, int]]:
    """The functions of the user's code that cache results, and how many they hold."""
    return {
        id(each): (each, each.cache_info().currsize)
        for each in gc.get_objects()
        if type(each) is CACHING
        and str(each.__module__).split(".")[0] not in ("torch", "lightning", "numpy")
    }


def _widen(
    held: Sequence[tuple[nn.Module, dict[str, Any]]], dtype: torch.dtype
) -> None:
    """Give modules the wide copies of the buffers or attributes that they hold."""
    for module, values in held:
        for name, value in values.items():
            if isinstance(value, Tensor) and wide_for(value.dtype, dtype):
                place = module._buffers if name in module._buffers else vars(module)
                place[name] = widened(value, dtype)


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
