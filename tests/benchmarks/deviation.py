"""How far the weights end from the big batch's: the README's table.

    python -m tests.benchmarks.deviation

One epoch with SGD, in float32. The deviation is a share of the distance travelled.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.benchmarks.measuring import table
from tests.helpers import (
    TokenModule,
    deviation,
    loader,
    quiet_lightning,
    ragged_sequences,
    raise_rank_errors,
    rank_loader,
    run_ranks,
    train_on_windows,
    trainer,
    weights,
    windows_over_ranks,
)
from trainkit import AccumulationCallback, PerSample, PerToken

RAGGED = ragged_sequences(68, longest=60)
ALIKE = [(ids[:1].repeat(8), labels[:1].repeat(8)) for ids, labels in RAGGED]


def big_batch(windows: Sequence[Sequence[Any]]) -> Tensor:
    """The weights after one step for each window, made in one pass."""
    return weights(train_on_windows(TokenModule(), windows, epochs=1))


def fit(batches: Any, accumulate: int, weighed: Any, **options: Any) -> Tensor:
    """The weights after one epoch; without a strategy by plain Lightning."""
    module = TokenModule()
    callbacks = [] if weighed is None else [AccumulationCallback(weighed)]
    quiet = trainer(accumulate, max_epochs=1, callbacks=callbacks, **options)
    quiet.fit(module, batches)
    return weights(module)


def fit_on_ranks(rank: int, world_size: int, weighed: Any) -> Tensor:
    batches = rank_loader(RAGGED, 2, rank, world_size)
    how: Any = {"devices": world_size, "use_distributed_sampler": False}
    return fit(batches, 4, weighed, strategy="ddp", **how)


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    start = weights(TokenModule())
    rows: list[tuple[str, Any, Any, Any]] = []
    with quiet_lightning():
        for name, samples, size, strategy in (
            ("ragged sequences, one at a time", RAGGED, 1, PerToken()),
            ("ragged sequences, four at a time", RAGGED, 4, PerToken()),
            ("equal sequences, short last window", ALIKE[:36], 4, PerSample()),
            ("equal sequences, smaller last batch", ALIKE[:63], 4, PerSample()),
        ):
            plain, exact = (
                fit(loader(samples, size), 16 // size, each)
                for each in (None, strategy)
            )
            windows = [samples[i : i + 16] for i in range(0, len(samples), 16)]
            rows.append((name, big_batch(windows), plain, exact))
        plain, exact = (
            raise_rank_errors(run_ranks(fit_on_ranks, 2, each))[0]
            for each in (None, PerToken())
        )
        reference = big_batch(windows_over_ranks(RAGGED, 2, 4, 2))
        rows.append(("ragged sequences, two ranks (DDP)", reference, plain, exact))
    table("windows of 16 sequences, one epoch", "plain Lightning", "trainkit")
    for name, reference, plain, exact in rows:
        off = deviation(plain, reference, start)
        print(f"| {name} | {off:.0%} | {deviation(exact, reference, start):.0e} |")


if __name__ == "__main__":
    main()
