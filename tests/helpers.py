"""What the tests share: ragged data, a small model, the big batch, several ranks."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import socket
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import cache
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from tests.startup import forked

VOCABULARY = 13

TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 1e-5,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}
"""Largest deviation from the big batch, as a share of the distance travelled."""

NAIVE = 1e-2
"""Least deviation that the naive method must show, or the test proves nothing."""


def ragged_sequences(
    number: int = 38, *, longest: int = 20, seed: int = 0
) -> list[tuple[Tensor, Tensor]]:
    """Sequences of very different lengths, with a rule to learn."""
    generator = torch.Generator().manual_seed(seed)
    sequences = []
    for _ in range(number):
        length = int(torch.randint(1, longest, (1,), generator=generator))
        ids = torch.randint(0, VOCABULARY, (length,), generator=generator)
        sequences.append((ids, (3 * ids + 1) % VOCABULARY))
    return sequences


def pad(samples: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Collate ragged sequences; labels of padding are ignored."""
    longest = max(len(ids) for ids, _ in samples)
    ids = torch.zeros(len(samples), longest, dtype=torch.long)
    labels = torch.full((len(samples), longest), -100)
    for row, (x, y) in enumerate(samples):
        ids[row, : len(x)] = x
        labels[row, : len(y)] = y
    return {"ids": ids, "labels": labels}


class TokenNet(nn.Module):
    """A small net with one prediction for each token."""

    def __init__(self, *, dtype: torch.dtype = torch.float32, seed: int = 1) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embed = nn.Embedding(VOCABULARY, 8)
            self.head = nn.Linear(8, VOCABULARY)
        self.to(dtype)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(ids)))


def token_loss(net: nn.Module, batch: Any, reduction: str = "mean") -> Tensor:
    """Cross entropy over the labels that count."""
    logits = net(batch["ids"]).flatten(0, 1).float()
    if next(net.parameters()).dtype == torch.float64:
        logits = net(batch["ids"]).flatten(0, 1)
    return F.cross_entropy(logits, batch["labels"].flatten(), reduction=reduction)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.5),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.2, momentum=0.9, weight_decay=0.01),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01),
}


class TokenModule(pl.LightningModule):
    """A LightningModule that knows nothing of trainkit."""

    def __init__(
        self,
        *,
        optimizer: str = "sgd",
        reduction: str = "mean",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.net = TokenNet(dtype=dtype)
        self.optimizer_name = optimizer
        self.reduction = reduction

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return token_loss(self.net, batch, self.reduction)

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.optimizer_name](self.parameters())


def loader(
    sequences: Sequence[Any], batch_size: int, *, collate: Any = pad
) -> DataLoader[Any]:
    return DataLoader(sequences, batch_size=batch_size, collate_fn=collate)  # type: ignore[arg-type]


QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "max_epochs": 2,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def trainer(accumulate: int = 1, **options: Any) -> pl.Trainer:
    """A quiet Trainer on the CPU."""
    return pl.Trainer(accumulate_grad_batches=accumulate, **{**QUIET, **options})


def weights(module: nn.Module) -> Tensor:
    """All parameters as one float64 vector."""
    return torch.cat([p.detach().double().flatten() for p in module.parameters()])


def gradients(module: nn.Module) -> Tensor:
    """All gradients as one float64 vector."""
    found = [p.grad for p in module.parameters() if p.grad is not None]
    return torch.cat([g.detach().double().flatten() for g in found])


def deviation(trained: Any, reference: Any, start: Any) -> float:
    """How far off the weights are, as a share of the distance travelled."""
    ends = [x if isinstance(x, Tensor) else weights(x) for x in (trained, reference)]
    origin = start if isinstance(start, Tensor) else weights(start)
    return float((ends[0] - ends[1]).norm() / (ends[1] - origin).norm())


@contextlib.contextmanager
def quiet_lightning() -> Iterator[None]:
    """Without the advice that Lightning gives in every run."""
    loggers = [
        logging.getLogger(f"{n}.{m}") for n in ("lightning",) for m in ("pytorch",)
    ]
    loggers.append(logging.getLogger("pytorch_lightning"))
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


# ---- several ranks -------------------------------------------------------------------


PATIENCE = 240.0
"""Seconds after which another process has hung: what a test waits for is an event. A
machine may be busy with anything else besides."""


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Run `function(rank, world_size, *args)` in processes of their own, with gloo.

    The function must stand at the top level of a module. What it returns comes back
    in the order of the ranks; an exception comes back as a `RankError`.
    """
    context = _context()
    with tempfile.TemporaryDirectory() as folder:
        port = _free_port()
        processes = [
            context.Process(
                target=_rank_main,
                args=(function, rank, world_size, port, folder, args),
                daemon=True,
            )
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(PATIENCE)
        hung = [rank for rank, p in enumerate(processes) if p.is_alive()]
        for process in processes:
            process.kill()
        if hung:
            raise AssertionError(f"ranks {hung} hung for {PATIENCE} s")
        files = [Path(folder, f"{rank}.pt") for rank in range(world_size)]
        return [
            torch.load(f, weights_only=False) if f.exists() else RankError("died")
            for f in files
        ]


@cache
def _context() -> ForkServerContext:
    """Forks of a process that is itself a fork of the one that has imported all."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["tests.helpers", "trainkit.lit.front.mixin"])
    before = dict(os.environ)
    os.environ.update(forked())
    try:
        ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return context


class RankError(Exception):
    """What a rank raised: its type's name, its text and its traceback."""


def raise_rank_errors(results: list[Any]) -> list[Any]:
    for result in results:
        if isinstance(result, RankError):
            raise result
    return results


def _rank_main(
    function: Any, rank: int, world_size: int, port: int, folder: str, args: Any
) -> None:
    gc.freeze()  # full collections then look at the tests' own objects only
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        GROUP_RANK="0",
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="tests",  # Lightning then starts no processes of its own
        TORCHELASTIC_USE_AGENT_STORE="False",
    )
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        with quiet_lightning():
            result = function(rank, world_size, *args)
    except BaseException as error:
        result = _rank_error(error)
    written = Path(folder, f"{rank}.tmp")
    torch.save(result, written)
    written.rename(Path(folder, f"{rank}.pt"))
    # The first rank serves the others' store, and a socket that closes early fails
    # a rank that is still connecting: leave together, if nobody has failed.
    leave_at = time.monotonic() + PATIENCE / 2
    while (
        not isinstance(result, RankError)
        and len(list(Path(folder).glob("*.pt"))) < world_size
        and time.monotonic() < leave_at
    ):
        time.sleep(0.005)
    os._exit(0)  # without waiting for a process group whose other ranks have failed


Case = tuple[Any, ...]
"""A function that takes `(rank, world_size, *args)`, and its `args`."""


def run_cases(world_size: int, cases: Mapping[Any, Case]) -> dict[Any, list[Any]]:
    """What each case returns, in the order of the ranks: as `run_ranks` gives it.

    One case runs after the other in the processes of one start. A case that fails
    comes back as a `RankError`, and must fail on all ranks.
    """
    ranks = run_ranks(_all, world_size, list(cases.values()))
    return {
        name: [each[index] if isinstance(each, list) else each for each in ranks]
        for index, name in enumerate(cases)
    }


def _all(rank: int, world_size: int, cases: list[Case]) -> list[Any]:
    return [_one(rank, world_size, *case) for case in cases]


def _one(rank: int, world_size: int, function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(rank, world_size, *args)
    except Exception as error:
        return _rank_error(error)


def _rank_error(error: BaseException) -> RankError:
    return RankError(f"{type(error).__name__}: {error}\n{traceback.format_exc()}")


def start_gloo() -> None:
    """Join the ranks of `run_ranks`, for a plain training loop."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE / 2))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def rank_loader(
    sequences: Sequence[Any], batch_size: int, rank: int, world_size: int
) -> DataLoader[Any]:
    """Each rank's own share, in order.

    A Trainer needs `use_distributed_sampler=False` to leave it so.
    """
    sampler = DistributedSampler(
        sequences,  # type: ignore[arg-type]
        num_replicas=world_size,
        rank=rank,
        shuffle=False,
        drop_last=False,
    )
    assert len(sequences) % world_size == 0, "a distributed sampler would repeat rows"
    return DataLoader(sequences, batch_size=batch_size, sampler=sampler, collate_fn=pad)  # type: ignore[arg-type]


def windows_over_ranks(
    sequences: Sequence[Any], batch_size: int, accumulate: int, world_size: int
) -> list[list[Any]]:
    """The samples of each window of an epoch, those of all ranks of `rank_loader`."""
    shares = [sequences[rank::world_size] for rank in range(world_size)]
    size = batch_size * accumulate
    return [
        [sample for share in shares for sample in share[start : start + size]]
        for start in range(0, len(shares[0]), size)
    ]


def train_on_windows(
    module: TokenModule,
    windows: Sequence[Sequence[Any]],
    *,
    epochs: int = 2,
    clip: float | None = None,
) -> TokenModule:
    """The reference: each window in one backward pass, in a bare loop."""
    optimizer = module.configure_optimizers()
    for window in list(windows) * epochs:
        optimizer.zero_grad()
        token_loss(module.net, pad(window)).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
    return module
