"""One plan for a window over all ranks, beside ranks that cut their own rows.

    python -m tests.benchmarks.window_plans [--rounds 5]

First by arithmetic alone, for up to 64 ranks: what the slowest rank computes, times the
ranks, as a share of the real tokens; in brackets if ranks meet in every micro-batch.
Then measured, on 1, 2 and 4 gloo ranks: real tokens a second, as a multiple of plain
Lightning's in the same round. The lengths are log-normal. Hugging Face's sampler is its
own class, with as many micro-batches as the plan.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler
from transformers.trainer_pt_utils import BatchRebalanceSampler

from tests.benchmarks.measuring import asked, table
from tests.helpers import raise_rank_errors, run_ranks, trainer
from trainkit import (
    AccumulationCallback,
    MicroBatching,
    PackCollate,
    PadCollate,
    PerToken,
    ResumableLoader,
    WindowSampler,
)
from trainkit.core.split.partition import partition
from trainkit.data.window_plan import planned, rounds_needed

Plan = Sequence[Sequence[Sequence[int]]]
"""For each rank the rows of each of its micro-batches."""

SIZES = ((8, 64), (8, 256), (8, 1024), (64, 256), (64, 1024))
"""Ranks, and rows of a window."""
TOKENS, NUM_WINDOWS = 4096, 20


def lengths_of(number: int, seed: int, *, longest: int = 2048) -> list[int]:
    drawn = np.random.default_rng(seed).lognormal(5, 1, number)
    return np.clip(drawn, 8, longest).astype(int).tolist()


# ---- by arithmetic -------------------------------------------------------------------


def ranks_alone(lengths: list[int], num_ranks: int) -> Plan:
    found = []
    for rank in range(num_ranks):
        own = range(rank, len(lengths), num_ranks)
        parts = partition([[(0, lengths[row]) for row in own]], tokens=TOKENS)
        found.append([[own[n] for n in part] for part in parts])
    return found


def hugging_face(lengths: list[int], num_ranks: int, rounds: int) -> Plan:
    how: Any = {"dp_size": num_ranks, "grad_accum": rounds, "shuffle": False}
    return [
        list(BatchRebalanceSampler(lengths, len(lengths), rank=rank, **how))
        for rank in range(num_ranks)
    ]


def one_plan(lengths: list[int], num_ranks: int, rounds: int, flat: bool) -> Plan:
    how: Any = {"num_ranks": num_ranks, "tokens": TOKENS, "flattened": flat}
    return list(zip(*planned(lengths, rounds=rounds, **how), strict=True))


def slowest(lengths: list[int], plan: Plan, *, flat: bool = False) -> Any:
    """Of one window: what is computed over the real tokens, and if ranks meet."""
    number = max(map(len, plan))
    computed = np.zeros((len(plan), number))
    for rank, batches in enumerate(plan):
        for nth, batch in enumerate(batches):
            own = [lengths[row] for row in batch]
            computed[rank, nth] = sum(own) if flat else len(own) * max(own)
    scale = len(plan) / sum(lengths)
    return computed.sum(1).max() * scale, computed.max(0).sum() * scale


def simulate() -> None:
    table("ranks, rows", "ranks alone", "Hugging Face", "one plan", "flattened")
    for num_ranks, number in SIZES:
        windows = [lengths_of(number, seed) for seed in range(NUM_WINDOWS)]
        how: Any = {"num_ranks": num_ranks, "tokens": TOKENS}
        rounds = max(rounds_needed(each, **how) for each in windows)
        rounds = min(rounds, number // num_ranks)
        of_all = (num_ranks, rounds)
        columns = [
            [slowest(w, ranks_alone(w, num_ranks)) for w in windows],
            [slowest(w, hugging_face(w, *of_all)) for w in windows],
            [slowest(w, one_plan(w, *of_all, False)) for w in windows],
            [slowest(w, one_plan(w, *of_all, True), flat=True) for w in windows],
        ]
        cells = [np.mean(each, axis=0) for each in columns]
        row = " | ".join(f"{apart:.2f} ({meeting:.2f})" for apart, meeting in cells)
        print(f"| {num_ranks}, {number} | {row} |")


# ---- measured ------------------------------------------------------------------------

WINDOW, BUDGET, WORDS, WIDTH = 128, 1024, 200, 96
LENGTHS = lengths_of(384, 0, longest=512)
ROWS: Any = [{"input_ids": torch.arange(n) % WORDS} for n in LENGTHS]


class Net(pl.LightningModule):
    """A token-wise model, which costs the same padded and flattened."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(WIDTH, WIDTH), nn.GELU()] * 3
        ends = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.net = nn.Sequential(ends[0], *layers, ends[1])
        self.computed = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids = batch["input_ids"]
        self.computed += ids.numel()
        return F.cross_entropy(self.net(ids).flatten(0, 1), batch["labels"].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Clock(pl.Callback):
    seconds = 0.0

    def on_train_start(self, *args: Any, **kwargs: Any) -> None:
        self._began = time.perf_counter()

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self.seconds = time.perf_counter() - self._began


def padded(rows: Sequence[Any]) -> Any:
    pad = PadCollate({"labels": -100})
    return pad([{**row, "labels": row["input_ids"]} for row in rows])


def plans(rank: int, num_ranks: int) -> Iterator[tuple[str, Any, Any, int]]:
    """Of each way its name, the loader, options of the callback, and the window."""
    how: Any = {"window": WINDOW, "tokens": BUDGET, "num_replicas": num_ranks}
    plan = WindowSampler(LENGTHS, **how)
    k = plan.micro_batches
    shares: Any = DistributedSampler(ROWS, num_ranks, rank)
    each = WINDOW // num_ranks
    size = each // k or 1
    plain = DataLoader(ROWS, size, sampler=shares, collate_fn=padded)
    yield "plain Lightning", plain, None, each // size
    alone = ResumableLoader(ROWS, each, shuffle=True, collate_fn=padded)
    yield "ranks alone", alone, {"micro_batching": MicroBatching(tokens=BUDGET)}, 1
    theirs: Any = BatchRebalanceSampler(LENGTHS, WINDOW, num_ranks, k, rank=rank)
    balanced = DataLoader(ROWS, batch_sampler=theirs, collate_fn=padded)
    yield "Hugging Face", balanced, {}, k
    ours = ResumableLoader(ROWS, batch_sampler=plan, collate_fn=padded)
    yield "one plan", ours, {}, k
    flat = WindowSampler(LENGTHS, flattened=True, **how)
    packed = ResumableLoader(ROWS, batch_sampler=flat, collate_fn=PackCollate())
    yield "flattened", packed, {}, flat.micro_batches


def train(rank: int, num_ranks: int) -> dict[str, tuple[float, int]]:
    """Of each way the seconds of an epoch, and the tokens that this rank computed."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(max((os.cpu_count() or 1) // num_ranks, 1))
    found = {}
    ways = list(plans(rank, num_ranks))
    for name, loader, options, window in [ways[0], *ways]:  # the first one warms up
        clock, module = Clock(), Net()
        callbacks: list[Any] = [clock]
        if options is not None:
            callbacks.append(AccumulationCallback(PerToken(), proof="off", **options))
        fitting = trainer(
            window,
            callbacks=callbacks,
            devices=num_ranks,
            strategy="ddp" if num_ranks > 1 else "auto",
            max_epochs=1,
            use_distributed_sampler=False,
        )
        fitting.fit(module, loader)
        found[name] = clock.seconds, module.computed
    return found


def measure(rounds: int) -> None:
    for num_ranks in (1, 2, 4):
        ratios: dict[str, list[float]] = {}
        computed: dict[str, int] = {}
        for _ in range(rounds):
            ranks = raise_rank_errors(run_ranks(train, num_ranks))
            plain = max(each["plain Lightning"][0] for each in ranks)
            for name in ranks[0]:
                seconds = max(each[name][0] for each in ranks)
                ratios.setdefault(name, []).append(plain / seconds)
                computed[name] = max(each[name][1] for each in ranks)
        table(f"{num_ranks} ranks", "real tokens a second / Lightning's", "slowest")
        for name, each in ratios.items():
            share = computed[name] * num_ranks / sum(LENGTHS)
            print(f"| {name} | {median(each):.2f} | {share:.2f} |", flush=True)


def main() -> None:
    options = asked(__doc__, rounds=5)
    simulate()
    measure(options.rounds)


if __name__ == "__main__":
    main()
