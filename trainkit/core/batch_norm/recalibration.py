"""Computing BatchNorm's running statistics anew from the data.

Running statistics are a fading mean over micro-batches that older weights have seen.
"Precise BatchNorm" (Wu and Johnson 2021, arXiv 2105.07576) replaces them, before they
are used, by the mean and variance over many samples under the present weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from graphlib import CycleError, TopologicalSorter
from typing import Any

import torch
from torch import Tensor

from trainkit.core.batch_norm.layers import BatchNorm, Layers
from trainkit.core.batch_norm.statistics import joined, statistics_of
from trainkit.core.ranks import Ranks
from trainkit.core.window import totals_dtype


@torch.no_grad()
def recalibrate(
    layers: Layers,
    batches: Callable[[], Iterable[Any]],
    forward: Callable[[Any], object],
    *,
    exact: bool = True,
    ranks: Ranks | None = None,
) -> int:
    """Replace running statistics by the data's, under the present weights.

    With `exact`, one layer after another gets its statistics, in one pass over the data
    each. Its inputs come from layers that already normalise by the statistics of all
    data, so the result equals all data as one batch. Without `exact` there is one pass,
    in which every layer normalises each micro-batch by itself. That is exact for the
    first layer only.

    Micro-batches count by their samples, however many there are on each rank.

    Args:
        layers: the layers by name, equal on all ranks.
        batches: returns the micro-batches of a pass; equal ones at each call.
        forward: runs the model on a micro-batch.
        exact: layer by layer, or in one pass.
        ranks: the ranks that share the statistics, each with its own data.

    Returns:
        How many passes were made.
    """
    ranks = ranks or Ranks()
    saved = {n: [b.clone() for b in _buffers(layer)] for n, layer in layers.items()}
    with _in_evaluation(layers):
        try:
            if exact:
                return _layer_by_layer(layers, batches, forward, ranks)
            _in_one_pass(layers, batches, forward, ranks)
            return 1
        except BaseException:
            for name, layer in layers.items():
                for buffer, copy in zip(_buffers(layer), saved[name], strict=True):
                    buffer.copy_(copy)
            raise


def _layer_by_layer(layers: Layers, batches: Any, forward: Any, ranks: Ranks) -> int:
    found: dict[str, Tensor] = {}
    for name in _agreed_order(layers, batches, forward, ranks):
        found[name] = _none(layers[name])

        def collect(layer: Any, x: Tensor, name: str = name) -> None:
            found[name] = _added(found[name], statistics_of(x))

        with _hooked([layers[name]], collect):
            for batch in batches():
                forward(batch)
        found[name] = _over(ranks, found[name])
        _put(layers[name], found[name], unbiased=False)
    for name, statistics in found.items():
        _put(layers[name], statistics, unbiased=True)
    return len(found)


def _in_one_pass(layers: Layers, batches: Any, forward: Any, ranks: Ranks) -> None:
    names = {id(layer): name for name, layer in layers.items()}
    found = {name: _none(layer) for name, layer in layers.items()}

    def collect(layer: Any, x: Tensor) -> None:
        own, name = statistics_of(x), names[id(layer)]
        found[name] = _added(found[name], own)
        _put(layer, own, unbiased=False)  # so that it normalises by this micro-batch

    with _hooked(layers.values(), collect):
        for batch in batches():
            forward(batch)
    for name, statistics in found.items():
        total = _over(ranks, statistics)
        if total[0] > 0:  # a layer that was never called keeps its statistics
            _put(layers[name], total, unbiased=True)


def _agreed_order(
    layers: Layers, batches: Any, forward: Any, ranks: Ranks
) -> list[str]:
    """An order, equal on all ranks, in which layers come after those that feed them.

    A batch may leave layers out, and a rank may have no batch. So the order is made
    from the pairs of layers that followed each other in any forward pass.
    """
    names = {id(layer): name for name, layer in layers.items()}
    calls: list[list[str]] = []
    with _hooked(layers.values(), lambda m, x: calls[-1].append(names[id(m)])):
        for batch in batches():
            calls.append([])
            forward(batch)
    device = _buffers(next(iter(layers.values())))[0].device
    index = {name: i for i, name in enumerate(layers)}
    follows = torch.zeros(len(layers), len(layers), dtype=totals_dtype(device))
    for called in calls:
        for name in called:
            follows[index[name], index[name]] = 1  # it is called at all
        for before, after in itertools.pairwise(called):
            follows[index[after], index[before]] = 1
    table = ranks.gather_rows(follows.flatten().to(device)).wait()
    after_before = table.amax(0).view_as(follows).tolist()
    graph = {
        name: [other for other in layers if row[index[other]] and other != name]
        for name, row in zip(layers, after_before, strict=True)
        if row[index[name]]
    }
    try:
        return list(TopologicalSorter(graph).static_order())
    except CycleError:  # a layer that is called at two depths has no definite place
        return list(graph)


@contextmanager
def _hooked(layers: Iterable[BatchNorm], hook: Any) -> Iterator[None]:
    def look(layer: Any, args: Any, kwargs: Any) -> None:
        hook(layer, args[0] if args else kwargs["input"])

    handles = [
        layer.register_forward_pre_hook(look, with_kwargs=True) for layer in layers
    ]
    try:
        # A compiled model would run without the hooks.
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _in_evaluation(layers: Layers) -> Iterator[None]:
    """Keep layers from updating their statistics, and from exchanging them."""
    modes = {name: layer.training for name, layer in layers.items()}
    for layer in layers.values():
        layer.training = False
    try:
        yield
    finally:
        for name, layer in layers.items():
            layer.training = modes[name]


def _none(layer: BatchNorm) -> Tensor:
    """The statistics of no rows, wide enough to add up many."""
    device = _buffers(layer)[0].device
    num = 1 + 2 * layer.num_features
    return torch.zeros(num, dtype=totals_dtype(device), device=device)


def _added(one: Tensor, other: Tensor) -> Tensor:
    return joined(torch.stack([one, other.to(one.dtype)]))


def _over(ranks: Ranks, own: Tensor) -> Tensor:
    """Statistics of all ranks together, equal on each rank to the last bit."""
    return joined(ranks.gather_rows(own).wait())


def _put(layer: BatchNorm, statistics: Tensor, *, unbiased: bool) -> None:
    """Write statistics into a layer's running ones.

    Args:
        layer: the layer to change.
        statistics: of its inputs.
        unbiased: True writes the variance over count - 1, which torch keeps; False
            the variance over count, by which torch normalises in training.
    """
    count, (mean, squares) = statistics[0], statistics[1:].view(2, -1)
    running_mean, running_var = _buffers(layer)
    running_mean.copy_(mean)
    running_var.copy_(squares / (count - 1 if unbiased else count).clamp(min=1))


def _buffers(layer: BatchNorm) -> list[Tensor]:
    assert layer.running_mean is not None
    assert layer.running_var is not None
    return [layer.running_mean, layer.running_var]
