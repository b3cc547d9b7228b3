"""Computing BatchNorm's running statistics anew from the data.

Running statistics are a fading mean over micro-batches that older weights have seen.
"Precise BatchNorm" (Wu and Johnson 2021, arXiv 2105.07576) replaces them, before they
are used, by the mean and variance over many samples under the present weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
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

    With `exact`, there are as many passes over the data as layers follow each other.
    Each pass gives all layers the statistics of what they get. A layer whose inputs
    come from layers that already normalise by the statistics of all data then has them
    too, so the result equals all data as one batch. Without `exact` there is one pass,
    in which every layer normalises each micro-batch by itself. That is exact for the
    first layer only.

    Micro-batches count by their samples, however many there are on each rank. If the
    forward pass fails, the statistics are between those before and those of the data.

    Args:
        layers: the layers by name, equal on all ranks.
        batches: returns the micro-batches of a pass; equal ones at each call.
        forward: runs the model on a micro-batch.
        exact: until nothing changes any more, or in one pass.
        ranks: the ranks that share the statistics, each with its own data.

    Returns:
        How many passes were made.
    """
    ranks, modes = ranks or Ranks(), {each: each.training for each in layers.values()}
    num_passes, found = 0, {name: _none(layer) for name, layer in layers.items()}
    try:
        for layer in modes:
            layer.training = False  # it neither moves its statistics nor exchanges them
        while num_passes < (len(layers) if exact else 1):
            num_passes += 1
            before, found = found, _one_pass(layers, batches, forward, exact, ranks)
            if all(torch.equal(found[name], before[name]) for name in layers):
                break
            for name, statistics in found.items():
                _put(layers[name], statistics, unbiased=False)
    finally:
        for layer, was_training in modes.items():
            layer.training = was_training
    for name, statistics in found.items():
        _put(layers[name], statistics, unbiased=True)
    return num_passes


def _one_pass(
    layers: Layers, batches: Any, forward: Any, exact: bool, ranks: Ranks
) -> dict[str, Tensor]:
    """The statistics of what each layer gets, on all ranks."""
    names = {id(layer): name for name, layer in layers.items()}
    found = {name: _none(layer) for name, layer in layers.items()}

    def collect(layer: Any, args: Any, kwargs: Any) -> None:
        x = args[0] if args else kwargs["input"]
        own, name = statistics_of(x), names[id(layer)]
        found[name] = joined(torch.stack([found[name], own.to(found[name].dtype)]))
        if not exact:
            _put(layer, own, unbiased=False)  # it normalises by this micro-batch

    with ExitStack() as stack:
        for layer in layers.values():
            hook = layer.register_forward_pre_hook(collect, with_kwargs=True)
            stack.enter_context(hook)
        # A compiled model would run without the hooks.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for batch in batches():
            forward(batch)
    # Equal on each rank to the last bit.
    return {name: joined(ranks.gather_rows(x)) for name, x in found.items()}


def _none(layer: BatchNorm) -> Tensor:
    """The statistics of no rows, wide enough to add up many."""
    device = _buffers(layer)[0].device
    num = 1 + 2 * layer.num_features
    return torch.zeros(num, dtype=totals_dtype(device), device=device)


def _put(layer: BatchNorm, statistics: Tensor, *, unbiased: bool) -> None:
    """Write statistics into a layer's running ones, unless they are those of no rows.

    Args:
        layer: the layer to change.
        statistics: of its inputs.
        unbiased: True writes the variance over count - 1, which torch keeps; False
            the variance over count, by which torch normalises in training.
    """
    count, (mean, squares) = statistics[0], statistics[1:].view(2, -1)
    if count > 0:
        running_mean, running_var = _buffers(layer)
        running_mean.copy_(mean)
        running_var.copy_(squares / (count - 1 if unbiased else count).clamp(min=1))


def _buffers(layer: BatchNorm) -> list[Tensor]:
    assert layer.running_mean is not None
    assert layer.running_var is not None
    return [layer.running_mean, layer.running_var]
