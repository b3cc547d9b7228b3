"""All that a window changes before its step, to be put back if it is run again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from trainkit.lit._compat import metric_fields
from trainkit.lit.random_state import read_states, write_states


class Snapshot:
    """A module's buffers, metric objects and counters, and all random generators.

    Parameters are not among it, since nothing but the step changes them, nor gradients.

    Args:
        pl_module: what trains.
        random: whether to keep the random generators as well.
    """

    def __init__(self, pl_module: Any, *, random: bool = True) -> None:
        self._device = pl_module.device
        self._buffers = [(b, b.detach().clone()) for b in pl_module.buffers()]
        self._metrics: list[tuple[Metric, dict[str, Any]]] = []
        self._counters: list[tuple[Any, dict[str, Any]]] = []
        for module in pl_module.modules():
            if isinstance(module, Metric):
                self._metrics.append((module, _metric_state(module)))
            else:
                self._counters.append((module, _counters(module)))
        self._random = read_states(self._device) if random else None

    def restore(self) -> None:
        with torch.no_grad():
            for buffer, before in self._buffers:
                buffer.copy_(before)
        for metric, state in self._metrics:
            for name, value in state.items():
                setattr(metric, name, _copied(value))
        for module, counters in self._counters:
            vars(module).update(counters)
        if self._random is not None:
            write_states(self._random, self._device)


def _metric_state(metric: Metric) -> dict[str, Any]:
    states = {name: _copied(value) for name, value in metric.metric_state.items()}
    return states | metric_fields(metric)


def _counters(module: Any) -> dict[str, Any]:
    """Plain numbers that a module counts with, such as the samples it has seen."""
    return {k: v for k, v in vars(module).items() if type(v) in (int, float)}


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return list(value) if isinstance(value, list) else value


class SetAside:
    """Gradients put away while something else is in their place.

    Args:
        parameters: whose gradients.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._held = [(p, p.grad) for p in parameters]
        for parameter, _ in self._held:
            parameter.grad = None

    def put_back(self) -> None:
        for parameter, gradient in self._held:
            parameter.grad = gradient

    @torch.no_grad()
    def add_back(self) -> None:
        """Put them back, with those that have come meanwhile added."""
        for parameter, gradient in self._held:
            if gradient is None:
                continue
            if parameter.grad is not None:
                gradient.add_(parameter.grad)
            parameter.grad = gradient
