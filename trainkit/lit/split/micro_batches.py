"""A loader batch as the micro-batches that this rank will run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from trainkit.core.accumulator import Accumulator
from trainkit.core.nested import describe, is_array
from trainkit.core.split.cutting import Cutter, Limit, MicroBatch
from trainkit.core.split.micro_batching import MicroBatching
from trainkit.core.strategies import (
    AccumulationStrategy,
    PerToken,
    Strategies,
    Uniform,
    Weight,
)
from trainkit.core.terms import leading
from trainkit.core.told import weights_by_term
from trainkit.core.weighed import Weighed
from trainkit.errors import TrainkitError
from trainkit.lit.callback.said_weight import says_weights
from trainkit.lit.split import refusals
from trainkit.lit.split.sizes import AutoSizes, FixedSizes


@dataclass(frozen=True)
class WeighedMicroBatch:
    """A micro-batch and its weights, by term.

    Attributes:
        weights: NaN until `training_step` has run, if that says them.
        is_filler: whether it only lets all ranks run equally many micro-batches.
        is_said: whether `training_step` says its weight.
    """

    cut: MicroBatch
    weights: dict[str, Weight]
    is_filler: bool = False
    is_said: bool = False


class MicroBatches:
    """Cuts loader batches and weighs the micro-batches.

    If forward passes communicate, all ranks make as many micro-batches as the one that
    needs most: they cut finer, and when rows run out, they repeat a micro-batch with
    weight 0.

    Args:
        options: how to cut.
        pl_module: the module that trains.
        accumulator: has the windows of the micro-batches.
        sizes: the limit for a micro-batch.
        is_joined: whether BatchNorm sees the whole window. Then no rank repeats rows,
            and padding, which counts there, stays.
    """

    def __init__(
        self,
        options: MicroBatching,
        pl_module: Any,
        accumulator: Accumulator,
        sizes: FixedSizes | AutoSizes,
        *,
        is_joined: bool = False,
    ) -> None:
        self._options, self._strategies = options, accumulator.strategies
        self._accumulator = accumulator
        self._cutter = Cutter(options, _that_tells_lengths(self._strategies))
        self._sizes = sizes
        self._is_joined = is_joined
        self._run_alike = not is_joined and refusals.communicates_in_forward(
            pl_module, accumulator.ranks
        )
        self._device = pl_module.device
        self._is_list = options.collate is not None
        self._is_first = True
        self._has_said_too_long = False

    def has_padding(self, batch: Any) -> bool | None:
        """Whether some rows of a loader batch have columns that only pad; None if
        nothing tells their lengths."""
        return self._cutter.has_padding(batch)

    def of(self, batch: Any, *, trim: bool) -> list[WeighedMicroBatch]:
        """The micro-batches of a loader batch, the largest first.

        Args:
            batch: the loader batch.
            trim: leave out columns that are only padding in a micro-batch.
        """
        limit = None
        if self._sizes.catches:
            limit = self._sizes.begin(self._cutter.measure(batch))
        trim = trim and not self._is_joined
        cut = self._cutter.cut(batch, limit, trim=trim)
        if self._run_alike:
            most = self._most(len(cut))
            if len(cut) < most:
                cut = self._cutter.cut(batch, limit, at_least=most, trim=trim)
        else:
            most = len(cut)
        self._say_too_long(limit)
        self._sizes.exchange(cut)
        micro_batches = self._weighed(batch, cut)
        if self._is_first:
            self._is_first = False
            loader_batch = None if self._is_list else batch
            _verify_cut(loader_batch, micro_batches, self._strategies)
        nothing = dict.fromkeys(self._strategies, 0)
        return micro_batches + [
            replace(micro_batches[-1], weights=nothing, is_filler=True, is_said=False)
            for _ in range(most - len(micro_batches))
        ]

    def _weighed(
        self, batch: Any, cut: Sequence[MicroBatch]
    ) -> list[WeighedMicroBatch]:
        if says_weights(self._strategies):
            return [
                WeighedMicroBatch(
                    each, dict.fromkeys(self._strategies, math.nan), is_said=True
                )
                for each in cut
            ]
        batches = [micro_batch.batch for micro_batch in cut]
        weights = weights_by_term(self._strategies, batches)
        return [
            WeighedMicroBatch(micro_batch, dict(zip(weights, each, strict=True)))
            for micro_batch, *each in zip(cut, *weights.values(), strict=True)
        ]

    def shared_fields(self) -> list[str]:
        """The fields that every micro-batch gets whole, which nobody has named."""
        named = set(map(str, self._options.shared))
        shared = self._cutter.shared
        return [path for path, value in shared if is_array(value) and path not in named]

    def _most(self, number: int) -> int:
        """The largest number of micro-batches on a rank; waits for all."""
        ranks = self._accumulator.ranks
        row = torch.tensor([float(number)], device=self._device)
        return int(ranks.gather_rows(row).wait().amax())

    def _say_too_long(self, limit: Limit | None) -> None:
        longest = self._cutter.longest_over_budget
        if longest is not None and limit is None and not self._has_said_too_long:
            self._has_said_too_long = True
            refusals.announce_too_long(longest)


def counts_of(micro_batches: Sequence[WeighedMicroBatch]) -> dict[str, int]:
    """The arguments of `Window.count`: tokens, padding among them, samples."""
    counting = [each.cut for each in micro_batches if not each.is_filler]
    has_lengths = any(m.padded != len(m.rows) for m in counting)
    return {
        "padding": sum(m.padded - m.real for m in counting),
        "tokens": sum(m.padded for m in counting) if has_lengths else 0,
        "samples": sum(len(m.rows) for m in counting),
    }


def _that_tells_lengths(strategies: Strategies) -> AccumulationStrategy:
    for strategy in strategies.values():
        if isinstance(strategy, PerToken):
            return strategy
    return leading(strategies)


def _verify_cut(
    loader_batch: Any,
    micro_batches: Sequence[WeighedMicroBatch],
    strategies: Strategies,
) -> None:
    """Refuse a cut by which rows and weights of the parts do not add up.

    `loader_batch` is None for a list of samples, which has no weight before collating.
    """
    rows = sorted(row for micro_batch in micro_batches for row in micro_batch.cut.rows)
    if rows != list(range(len(rows))):
        raise TrainkitError(
            f"MicroBatching: the micro-batches hold the rows {rows}, and each row must "
            f"be in exactly one. The batch is {describe(loader_batch)}."
        )
    if loader_batch is None:
        return
    for term, strategy in strategies.items():
        if isinstance(strategy, Uniform | Weighed):
            continue  # announced before training, or not known yet
        in_parts = sum(float(each.weights[term]) for each in micro_batches)
        in_all = float(strategy.weight(loader_batch))
        if not math.isclose(in_parts, in_all, rel_tol=1e-6, abs_tol=1e-9):
            raise TrainkitError(
                f"{type(strategy).__name__}: what micro-batches weigh must add up to "
                f"what their batch weighs, and {len(micro_batches)} of them weigh "
                f"{in_parts:g} together, the batch {in_all:g}. The batch is "
                f"{describe(loader_batch)}. Let weight() return a sum over rows."
            )
