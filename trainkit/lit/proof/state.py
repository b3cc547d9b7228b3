"""What a pass of `training_step` moves in a module, by value."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torchmetrics import Metric, MetricCollection

from trainkit.core.bare import names_in
from trainkit.lit.rerun.snapshot import FRAMEWORK, holds_plain_values

DEPTH = 4


def values_of(module: nn.Module) -> dict[str, Any]:
    """Copies of parameters, buffers and attributes, by their path; of normalisation
    layers and metrics nothing."""
    found: dict[str, Any] = {}
    for path, each in module.named_modules():
        if isinstance(each, _NormBase | Metric | MetricCollection):
            continue
        prefix = f"{path}." if path else ""
        held = {**each._parameters, **each._buffers}
        for name, value in held.items():
            if value is not None:
                found[prefix + name] = value.detach().clone()
        for name, value in vars(each).items():
            if name not in FRAMEWORK:
                found.update(_leaves(prefix + name, value, DEPTH))
    return found


def _leaves(path: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Tensor):
        yield path, value.detach().clone()
    elif isinstance(value, int | float | str):
        yield path, value
    elif depth and isinstance(value, dict):
        for key, each in value.items():
            yield from _leaves(f"{path}.{key}", each, depth - 1)
    elif depth and isinstance(value, list | tuple):
        yield f"{path} (length)", len(value)
        for number, each in enumerate(value[:100]):
            yield from _leaves(f"{path}.{number}", each, depth - 1)
    elif depth and holds_plain_values(value):
        yield from _leaves(path, names_in(value) or {}, depth - 1)


def moved(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The names whose values differ, or that are there only once."""
    names = dict.fromkeys([*before, *after])
    return [
        name
        for name in names
        if name not in before
        or name not in after
        or not _is_same(before[name], after[name])
    ]


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return (
            one.shape == other.shape
            and one.dtype == other.dtype
            and torch.equal(one.nan_to_num(), other.nan_to_num())
        )
    return type(one) is type(other) and one == other
