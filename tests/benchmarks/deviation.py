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

from tests.helpers import (
    OPTIMIZERS,
    TokenModule,
    deviation,
    loader,
    pad,
    quiet_lightning,
    ragged_sequences,
    raise_rank_errors,
    rank_loader,
    run_ranks,
    token_loss,
    trainer,
    weights,
)
from trainkit import AccumulationCallback, AccumulationStrategy, PerSample, PerToken

LONGEST = 60


def big_batch(windows: Sequence[Sequence[Any]]) -> Tensor:
    """The weights after one step for each window, made in one pass."""
    module = TokenModule()
    optimizer = OPTIMIZERS["sgd"](module.parameters())
    for window in windows:
        optimizer.zero_grad()
        token_loss(module.net, pad(window)).backward()
        optimizer.step()
    return weights(module)


def chunks(samples: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [samples[i : i + size] for i in range(0, len(samples), size)]


def fit(
    samples: Sequence[Any],
    size: int,
    accumulate: int,
    strategy: AccumulationStrategy | None,
) -> Tensor:
    module = TokenModule()
    callbacks = [] if strategy is None else [AccumulationCallback(strategy)]
    quiet = trainer(accumulate, max_epochs=1, callbacks=callbacks)
    quiet.fit(module, loader(samples, size))
    return weights(module)


def fit_on_ranks(rank: int, world_size: int, size: int, exact: bool) -> Tensor:
    module = TokenModule()
    callbacks = [AccumulationCallback(PerToken())] if exact else []
    quiet = trainer(
        4,
        max_epochs=1,
        strategy="ddp",
        devices=world_size,
        callbacks=callbacks,
        use_distributed_sampler=False,
    )
    samples = ragged_sequences(68, longest=LONGEST)
    quiet.fit(module, rank_loader(samples, size, rank, world_size))
    return weights(module)


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    start = weights(TokenModule())
    ragged = ragged_sequences(68, longest=LONGEST)
    alike = [(ids[:1].repeat(8), labels[:1].repeat(8)) for ids, labels in ragged]
    rows: list[tuple[str, Any, Any, Any]] = []
    with quiet_lightning():
        for name, samples, size, strategy in (
            ("ragged sequences, one at a time", ragged, 1, PerToken()),
            ("ragged sequences, four at a time", ragged, 4, PerToken()),
            ("equal sequences, short last window", alike[:36], 4, PerSample()),
            ("equal sequences, smaller last batch", alike[:63], 4, PerSample()),
        ):
            plain = fit(samples, size, 16 // size, None)
            exact = fit(samples, size, 16 // size, strategy)
            rows.append((name, big_batch(chunks(samples, 16)), plain, exact))
        shares = [ragged[0::2], ragged[1::2]]
        windows = zip(*(chunks(share, 8) for share in shares), strict=True)
        reference = big_batch([[*a, *b] for a, b in windows])
        plain, exact = (
            raise_rank_errors(run_ranks(fit_on_ranks, 2, 2, exact))[0]
            for exact in (False, True)
        )
        rows.append(("ragged sequences, two ranks (DDP)", reference, plain, exact))
    print("| windows of 16 sequences, one epoch | plain Lightning | trainkit |")
    print("|---|---:|---:|")
    for name, reference, plain, exact in rows:
        off = deviation(plain, reference, start)
        print(f"| {name} | {off:.0%} | {deviation(exact, reference, start):.0e} |")


if __name__ == "__main__":
    main()
