"""What a step costs: a bare loop, plain Lightning and trainkit on the same work.

    python -m tests.benchmarks.step_cost [--steps 200] [--rounds 9]

All contestants run in one process, round after round, each round in an order of its
own; what counts is the median over rounds of ratios within a round, so that a machine
which slows down slows all of them. "Overhead" is the time per optimizer step over that
of the bare loop.
"""

from __future__ import annotations

import contextlib
import gc
import io
import random
import time
import warnings
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from tests.benchmarks.measuring import Transformer, asked
from tests.helpers import quiet_lightning, trainer
from trainkit import (
    AccumulationCallback,
    AccumulationMixin,
    AccumulationSchedule,
    BatchNormGuard,
    LRScaling,
    MicroBatching,
    PerToken,
    WindowMonitor,
)

ACCUMULATE = 4
Batch = dict[str, Tensor]
Loader = DataLoader[Batch]


class Plain(pl.LightningModule):
    """A token classifier that times its own training, without set-up."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.seconds = 0.0

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return loss_of(self.net, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self.net)

    def on_train_start(self) -> None:
        self.seconds = -time.perf_counter()

    def on_train_end(self) -> None:
        self.seconds += time.perf_counter()


class Mixed(AccumulationMixin, Plain):
    accumulation = PerToken()
    proof = "off"  # it runs once a fit, and has a benchmark of its own


def run_split(
    net: nn.Module, batches: Loader, callbacks: Iterable[pl.Callback] = ()
) -> float:
    """The window's micro-batches come as one loader batch, and are cut again."""
    listed, module = list(batches), Mixed(net)
    whole = loader(
        {
            key: torch.cat([batch[key] for batch in listed[i : i + ACCUMULATE]])
            for key in listed[0]
        }
        for i in range(0, len(listed), ACCUMULATE)
    )
    module.micro_batching = MicroBatching(size=len(listed[0]["x"]))
    return run_lightning(module, whole, callbacks, 1)


def loss_of(net: nn.Module, batch: Batch) -> Tensor:
    logits = net(batch["x"]).flatten(0, -2)
    return F.cross_entropy(logits, batch["labels"].flatten())


def make_optimizer(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.01)


def run_bare(net: nn.Module, batches: Loader) -> float:
    """The shortest loop that accumulates, plainly and wrongly."""
    optimizer = make_optimizer(net)
    start = time.perf_counter()
    for index, batch in enumerate(batches):
        if index % ACCUMULATE == 0:
            optimizer.zero_grad()
        (loss_of(net, batch) / ACCUMULATE).backward()
        if (index + 1) % ACCUMULATE == 0:
            optimizer.step()
    return time.perf_counter() - start


def run_lightning(
    module: Plain,
    batches: Loader,
    callbacks: Iterable[pl.Callback] = (),
    accumulate: int = ACCUMULATE,
) -> float:
    monitored = any(isinstance(c, WindowMonitor) for c in callbacks)
    scheduled = any(isinstance(c, AccumulationSchedule) for c in callbacks)
    fit = trainer(
        1 if scheduled else accumulate,
        max_epochs=1,
        callbacks=list(callbacks),
        logger=DummyLogger() if monitored else False,
    )
    with contextlib.redirect_stdout(io.StringIO()):  # the table before training
        fit.fit(module, batches)
    return module.seconds


def monitor() -> pl.Callback:
    return WindowMonitor(50)


def rates_and_norms(micro_batch: int) -> list[pl.Callback]:
    how: Any = {"reference_batch": 1, "micro_batch": micro_batch, "warmup_steps": 100}
    return [LRScaling("linear", **how), BatchNormGuard("momentum")]


CONTESTANTS: dict[str, Callable[[nn.Module, Loader], float]] = {
    "bare loop": run_bare,
    "plain Lightning": lambda net, data: run_lightning(Plain(net), data),
    "idle callback": lambda net, data: run_lightning(Plain(net), data, [pl.Callback()]),
    "trainkit callback": lambda net, data: run_lightning(
        Plain(net), data, [AccumulationCallback(PerToken(), proof="off")]
    ),
    "trainkit mixin": lambda net, data: run_lightning(Mixed(net), data),
    "mixin, monitor": lambda net, data: run_lightning(Mixed(net), data, [monitor()]),
    "mixin, split": run_split,
    "mixin, split, monitor": lambda net, data: run_split(net, data, [monitor()]),
    "mixin, split, rates, BN": lambda net, data: run_split(
        net, data, [monitor(), *rates_and_norms(ACCUMULATE)]
    ),
    "mixin, rates, schedule, BN": lambda net, data: run_lightning(
        Mixed(net), data, [AccumulationSchedule({0: ACCUMULATE}), *rates_and_norms(1)]
    ),
}


def tiny_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def transformer() -> nn.Module:
    """Two layers, as small as anyone would train."""
    return Transformer(512, 512, dropout=0.0)


def mlp_batches(steps: int) -> Loader:
    return loader(
        {"x": torch.randn(4, 3, 8), "labels": torch.randint(0, 4, (4, 3))}
        for _ in range(steps * ACCUMULATE)
    )


def token_batches(steps: int) -> Loader:
    ids = [torch.randint(0, 512, (8, 128)) for _ in range(steps * ACCUMULATE)]
    return loader({"x": i, "labels": (i + 1) % 512} for i in ids)


def loader(batches: Iterable[Batch]) -> Loader:
    return DataLoader(list(batches), batch_size=None)  # type: ignore[arg-type]


def measure(
    make_net: Callable[[], nn.Module], batches: Loader, rounds: int
) -> dict[str, list[float]]:
    """Seconds per optimizer step of each contestant, one entry for each round."""
    steps = len(batches) // ACCUMULATE
    seconds: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    for index in range(rounds + 1):  # the first round only warms up
        for name, run in random.sample(list(CONTESTANTS.items()), len(CONTESTANTS)):
            gc.collect()
            elapsed = run(make_net(), batches) / steps
            if index:
                seconds[name].append(elapsed)
    return seconds


class CountSyncs(TorchDispatchMode):
    """Counts the operations by which a tensor's value reaches the host."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.number += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def count_syncs(batches: Loader) -> dict[str, int]:
    """Host syncs of a whole fit of each contestant."""
    counts = {}
    for name, run in CONTESTANTS.items():
        with CountSyncs() as counter:
            run(tiny_mlp(), batches)
        counts[name] = counter.number
    return counts


def print_table(title: str, seconds: dict[str, list[float]]) -> None:
    def paired(numerator: str, denominator: str) -> float:
        pairs = zip(seconds[numerator], seconds[denominator], strict=True)
        return median(a / b for a, b in pairs)

    def overhead(name: str) -> float:
        columns = (seconds[each] for each in (name, "plain Lightning", "bare loop"))
        rows = zip(*columns, strict=True)
        return median((own - bare) / (plain - bare) for own, plain, bare in rows)

    print(f"\n{title}, {ACCUMULATE} micro-batches a step")
    print(f"{'':26}{'ms a step':>10}{'/ Lightning':>13}{'overhead / its':>16}")
    for name, times in seconds.items():
        print(
            f"{name:26}{1e3 * median(times):10.3f}"
            f"{paired(name, 'plain Lightning'):13.3f}{overhead(name):16.2f}"
        )


def main() -> None:
    options = asked(__doc__, steps=200, rounds=9)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with quiet_lightning():
        print("host syncs in a fit of 20 steps:", count_syncs(mlp_batches(20)))
        mlp = measure(tiny_mlp, mlp_batches(options.steps), options.rounds)
        print_table("tiny MLP", mlp)
        few = max(options.steps // 20, 3)
        net = measure(transformer, token_batches(few), options.rounds)
        print_table("2-layer transformer", net)


if __name__ == "__main__":
    main()
