"""The BatchNorm layers that are normalised by a whole window."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from trainkit.core.batch_norm.layers import BatchNorm, listed
from trainkit.core.inside.moment import version_of
from trainkit.core.joins.statistics import Statistics, move_running
from trainkit.core.ranks import Ranks
from trainkit.errors import TrainkitError

OF_TORCH = (nn.modules.batchnorm._BatchNorm.forward, nn.SyncBatchNorm.forward)
"""The forwards whose meaning is known."""


def normalises_by_batch(layer: nn.Module) -> bool:
    """Whether a layer is a BatchNorm that normalises by the batch at present."""
    return isinstance(layer, BatchNorm) and (
        layer.training or layer.running_mean is None
    )


def refuse_other_layers(module: nn.Module, name: str) -> None:
    """Refuse layers that have a forward of their own."""
    others = [
        f"{name}.{path}" if path else name
        for path, layer in module.named_modules()
        if normalises_by_batch(layer) and _has_own_forward(layer)
    ]
    if others:
        raise TrainkitError(
            f"exact BatchNorm: {listed(others)} has a forward of its own, so its "
            f"statistics cannot be shared. Use torch's BatchNorm followed by the rest "
            f"of the layer, or another policy."
        )


def _has_own_forward(layer: nn.Module) -> bool:
    """Whether a layer's class, or the layer itself, has a forward of its own."""
    on_itself: Any = vars(layer).get("forward")
    while hasattr(on_itself, "before"):  # it stands in for another
        on_itself = on_itself.before
    return on_itself is not None or type(layer).forward not in OF_TORCH


class Moves:
    """The moves of the running statistics in one pass, which are made at its end.

    Args:
        layers: which move only so, with their names.
    """

    def __init__(self, layers: Mapping[nn.Module, str]) -> None:
        self._layers = layers
        self._before = self._versions()
        self._calls: list[tuple[BatchNorm, Statistics]] = []

    def add(self, layer: BatchNorm, statistics: Statistics) -> None:
        """Note a call of a layer."""
        self._calls.append((layer, statistics))

    def make(self) -> None:
        """Move the running statistics once for each call, in order."""
        now = self._versions()
        moved = [name for name in now if now[name] != self._before[name]]
        if moved:
            raise TrainkitError(
                f"exact BatchNorm: {listed(moved)} has moved its running statistics by "
                f"itself, as a compiled module does. Compile only parts without "
                f"BatchNorm, or use another policy."
            )
        for layer, statistics in self._calls:
            move_running(layer, statistics)
        self._calls = []

    def _versions(self) -> dict[str, int]:
        """How often each layer's buffers were changed; torch's kernel for CPUs does
        not count its moves of the mean, but the layer's own counter does."""
        return {
            name: sum(version_of(each) for each in layer.buffers(recurse=False))
            for layer, name in self._layers.items()
        }


def other_norms(module: nn.Module, name: str) -> dict[nn.Module, str]:
    """The layers that move running statistics of their own: InstanceNorm's."""
    return {
        layer: f"{name}.{path}" if path else name
        for path, layer in module.named_modules()
        if isinstance(layer, _NormBase)
        and not isinstance(layer, BatchNorm)
        and layer.training
        and layer.track_running_stats
    }


def running_statistics(module: nn.Module, layers: Mapping[nn.Module, str]) -> set[str]:
    """The names of the buffers of some layers in a module."""
    return {
        f"{path}.{name}".lstrip(".")
        for path, layer in module.named_modules()
        if layer in layers
        for name, _ in layer.named_buffers(recurse=False)
    }


class Sharing:
    """Which ranks share the statistics of a layer.

    Args:
        ranks: of all layers that say nothing else; default: this rank alone.
    """

    def __init__(self, ranks: Ranks | None = None) -> None:
        self._ranks = self._all = ranks or Ranks()

    @property
    def ranks(self) -> Ranks:
        """The ranks of all layers that say nothing else."""
        return self._ranks

    @contextmanager
    def none(self) -> Iterator[None]:
        """Within it, no ranks share statistics."""
        self._ranks = Ranks()
        try:
            yield
        finally:
            self._ranks = self._all

    def of(self, layer: BatchNorm) -> Ranks:
        """The ranks of one layer: a SyncBatchNorm has a group of its own."""
        group = getattr(layer, "process_group", None)
        if group is None or self.ranks.size == 1:
            return self.ranks
        size, index = dist.get_world_size(group), dist.get_rank(group)
        return Ranks(group=group, size=size, index=index)


def sharing_of(process_group: Any = None) -> Sharing:
    """All ranks of a group; the default group where none is given."""
    if not (dist.is_available() and dist.is_initialized()):
        return Sharing()
    size, index = dist.get_world_size(process_group), dist.get_rank(process_group)
    return Sharing(Ranks(group=process_group, size=size, index=index))


def devices_of(values: Iterable[Any]) -> set[Any]:
    """The devices of the tensors among some values."""
    return {value.device for value in values if isinstance(value, Tensor)}
