"""What measuring the noise scale costs: steps with and without it, in one training.

    python -m tests.benchmarks.noise_scale [--windows 40] [--length 128]

A transformer of ten million parameters trains in windows of four micro-batches, on rows
of `length` tokens. Every other window is measured, so that both kinds run on the same
machine at the same time; what counts is the median over pairs of neighbours. The norms
are also timed by themselves, since the difference is far below what a shared machine
varies by.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import nn

from tests.benchmarks.measuring import Transformer, asked
from trainkit import Accumulator, NoiseMoments, PerToken

WIDTH, LAYERS, VOCABULARY = 320, 7, 4096
ROWS, MICRO_BATCHES = 8, 4


def time_methods(cls: type, *names: str) -> Callable[[], float]:
    """Time methods of a class from now on; returns what tells the seconds so far."""
    seconds = [0.0]

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            found = method(*args, **options)
            seconds[0] += time.perf_counter() - start
            return found

        return run

    for name in names:
        setattr(cls, name, timed(getattr(cls, name)))
    return lambda: seconds[0]


def main() -> None:
    options = asked(__doc__, windows=40, threads=1, length=128)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    how: Any = {"dropout": 0.0, "norm_first": True}
    model = Transformer(VOCABULARY, VOCABULARY, width=WIDTH, layers=LAYERS, **how)
    number = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    accumulator = Accumulator(PerToken(), module=model)
    moments = NoiseMoments(accumulator, optimizer)
    ids = torch.randint(VOCABULARY, (MICRO_BATCHES, ROWS, options.length))

    def step(*, measured: bool) -> float:
        start = time.perf_counter()
        if measured:
            moments.watch()
        for batch in ids:
            logits = model(batch).flatten(0, 1)
            loss = nn.functional.cross_entropy(logits, batch.flatten())
            accumulator.backward(loss, {"labels": batch})
        stats = accumulator.finish(optimizer)
        if measured:
            moments.add(stats, samples=MICRO_BATCHES * ROWS)
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - start

    step(measured=True)
    ratios, plain = [], []
    for window in range(options.windows):
        order = (True, False) if window % 2 else (False, True)
        seconds = {each: step(measured=each) for each in order}
        ratios.append(seconds[True] / seconds[False])
        plain.append(seconds[False])
    spent = time_methods(NoiseMoments, "_see", "end", "close", "add")
    steps = [step(measured=True) for _ in range(options.windows)]
    print(f"{number:,} parameters, {len(list(model.parameters()))} tensors")
    print(f"a step: {1e3 * median(plain):.1f} ms")
    print(f"every window measured: {median(ratios) - 1:+.2%} (median of pairs)")
    own = spent() / len(steps)
    print(f"norms alone: {1e3 * own:.2f} ms, {spent() / sum(steps):.2%} of a step")


if __name__ == "__main__":
    main()
