"""Refusals of what split windows cannot do, and errors of the user's code in one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from trainkit.core.nested import describe
from trainkit.core.ranks import Ranks
from trainkit.core.said_weight import Weighed
from trainkit.core.split.filling import counts_every_row
from trainkit.core.split.micro_batching import MicroBatching
from trainkit.core.strategies import Strategies, Uniform, Weight
from trainkit.data.resumable import ResumableLoader
from trainkit.errors import TrainkitError
from trainkit.lit._compat import combined_loader


def refuse_wrong_type(options: Any) -> None:
    if options is not None and not isinstance(options, MicroBatching):
        raise TrainkitError(
            f"micro_batching: must be a MicroBatching, received {options!r}. "
            f"Write MicroBatching(size=4), MicroBatching(tokens=4096) or "
            f'MicroBatching("auto").'
        )


def refuse_before_training(pl_module: Any, strategies: Strategies) -> None:
    """Refuse modules that cannot work, before the first batch."""
    name = type(pl_module).__name__
    if not pl_module.automatic_optimization:
        raise TrainkitError(
            f"micro_batching: with automatic_optimization=False {name} runs its own "
            f"backward passes, inside training_step, where no batch can be cut. Leave "
            f"micro_batching out and call self.accumulate() for each micro-batch, or "
            f"leave the optimization to Lightning."
        )
    if any(isinstance(each, Uniform) for each in strategies.values()):
        rank_zero_warn(
            "trainkit | micro_batching: Uniform() weighs micro-batches alike, so the "
            "step depends on how its batch is cut, under 'auto' on memory and speed "
            "as well, and is not the big batch's. This is for comparison; to train "
            "say what training_step's mean is over: PerSample() or PerToken()."
        )


def refuse_auto(trainer: Any) -> None:
    raise TrainkitError(
        f'MicroBatching("auto"): under {type(trainer.strategy).__name__} forward '
        f"passes communicate, and a rank whose memory runs out inside one leaves "
        f"the others waiting, so a size cannot be tried. Say it: "
        f"MicroBatching(size=4) or MicroBatching(tokens=4096)."
    )


def communicates_in_forward(pl_module: Any, ranks: Ranks) -> bool:
    """Whether forward passes wait for other ranks, which then must run as many."""
    if ranks.size == 1:
        return False
    kinds = (nn.SyncBatchNorm, FullyShardedDataParallel)
    return any(isinstance(m, kinds) for m in pl_module.modules()) or any(
        isinstance(p, DTensor) for p in pl_module.parameters()
    )


# ---- weights that do not add up ------------------------------------------------------


def refuse_other_weights(
    strategies: Strategies,
    batches: Sequence[Any],
    weights: Mapping[str, Sequence[Weight]],
) -> None:
    """Refuse weights of the parts that do not add up to the loader batches'."""
    for term, strategy in strategies.items():
        if isinstance(strategy, Uniform):
            continue
        in_parts = sum(map(float, weights[term]))
        in_all = sum(float(strategy.weight(each)) for each in batches)
        if not math.isclose(in_parts, in_all, rel_tol=1e-6, abs_tol=1e-9):
            raise TrainkitError(
                f"{type(strategy).__name__}: what micro-batches weigh must add up to "
                f"what their batch weighs, and {len(weights[term])} of them weigh "
                f"{in_parts:g} together, the batch {in_all:g}. The batch is "
                f"{describe(batches[0])}. Let weight() return a sum over rows."
            )


def refuse_fillers_that_count(
    trainer: Any, pl_module: Any, strategies: Strategies
) -> None:
    """Refuse a loader that gives rows which must weigh nothing, where the strategy has
    nothing by which a row could say so."""
    loaders = [each for each in combined_loader(trainer).flattened if fills(each)]
    ends_before = all(trainer.num_training_batches < len(each) for each in loaders)
    if ends_before or not pl_module.automatic_optimization:
        return  # there are no fillers; or the module says its weights
    for strategy in strategies.values():
        is_free = isinstance(strategy, Uniform | Weighed)
        is_free = is_free or strategy.loss_reduction == "total"
        if not is_free and counts_every_row(strategy):
            raise TrainkitError(
                f"{type(strategy).__name__}: a row with which ResumableLoader("
                f"weigh_nothing=) fills a place must weigh nothing, and this strategy "
                f"counts every row. Use PerSample(mask=...) with a field that "
                f"weigh_nothing sets to 0, or PerToken() with labels that it sets to "
                f"ignore_index; or no weigh_nothing=."
            )


def fills(loader: Any) -> bool:
    """Whether an epoch of a loader has fillers."""
    return isinstance(loader, ResumableLoader) and loader.gives_fillers


# ---- errors of the user's code -------------------------------------------------------


def add_note(error: Exception, current: Any) -> None:
    """Add a note to an error of the user's code: what the code got, and which options
    change that. Python 3.10 has no notes."""
    write, number = getattr(error, "add_note", None), len(current.parts)
    if write is None or number == 1:
        return
    part = current.parts[current.index]
    with suppress(Exception):  # a batch of the user's own class may raise anything
        write(
            f"trainkit | micro_batching: this was micro-batch {current.index + 1} of "
            f"{number}, {len(part.rows)} of the {current.num_rows} rows of a loader "
            f"batch: {describe(part.batch)}. MicroBatching(shared=...) names what "
            f"every micro-batch is to get whole; trim=False keeps columns that are "
            f"only padding in it."
        )
