"""Trainings of `test_ranks.py`, each on one of several ranks."""

from __future__ import annotations

import io
import sys
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from tests.helpers import (
    TokenModule,
    deviation,
    loader,
    pad,
    ragged_sequences,
    raise_rank_errors,
    rank_loader,
    train_on_windows,
    trainer,
    weights,
    windows_over_ranks,
)
from tests.zoo.modules import (
    Gan,
    Manual,
    Plain,
    Sharded,
    Stream,
    hooked,
    on_front,
    whole,
)
from trainkit import PerToken
from trainkit.lit.windows import refusals

DATA = ragged_sequences(36)  # on 2 and on 3 ranks the epoch ends with a short window
BATCH, WINDOW = 4, 2
Samples = list[tuple[Tensor, Tensor]]


def fit(
    rank: int,
    world: int,
    front: str,
    kind: Any = Plain,
    *callbacks: pl.Callback,
    data: Any = DATA,
    made: dict[str, Any] | None = None,
    window: int = WINDOW,
    split: int | None = None,
    ckpt_path: str | None = None,
    **options: Any,
) -> Any:
    """Train on this rank's share of samples, or with a loader of its own. Where `split`
    is given, groups of so many ranks share their data, and parameters are sharded."""
    module, ours = on_front(front, kind, **made or {})
    each, strategy = split or 1, "ddp" if world > 1 else "auto"
    if isinstance(data, list):
        data = rank_loader(data, BATCH, rank // each, world // each)
    if split and world > 1:
        sizes: Any = {"data_parallel_size": world // split}
        sizes |= {"tensor_parallel_size": split, "save_distributed_checkpoint": False}
        strategy: Any = ModelParallelStrategy(**sizes, process_group_backend="gloo")
    how = {"strategy": strategy, "devices": world, "use_distributed_sampler": False}
    fitted = trainer(window, callbacks=[*ours, *callbacks], **{**how, **options})
    fitted.fit(module, data, ckpt_path=ckpt_path)
    return fitted


def train(rank: int, world: int, front: str, how: dict[str, Any]) -> Tensor:
    return whole(fit(rank, world, front, **how).lightning_module)


def deviations(
    ends: list[Any],
    data: Samples = DATA,
    optimizer: str = "sgd",
    clip: Any = None,
    replicas: int | None = None,
    of: tuple[int, int] = (BATCH, WINDOW),
    epochs: int = 2,
) -> list[float]:
    """How far each rank's weights are from those of the big batch on one process; `of`
    so many rows in a batch of a rank, and so many batches in a window."""
    reference = TokenModule(dtype=torch.float64, optimizer=optimizer)
    start = weights(reference)
    windows = windows_over_ranks(data, *of, replicas or len(ends))
    train_on_windows(reference, windows, clip=clip, epochs=epochs)
    return [deviation(end, reference, start) for end in raise_rank_errors(ends)]


def silenced(number: int, keep: int) -> Samples:
    """Every rank's labels are ignored, save those of rank `keep`."""
    return [
        (ids, labels if i % number == keep else torch.full_like(labels, -100))
        for i, (ids, labels) in enumerate(DATA)
    ]


LATER = [*silenced(2, 0)[: 2 * BATCH], *DATA[2 * BATCH :]]
"""The second rank's first batch has no labels."""

GRID = [
    ("mixin", "momentum", 0.05),
    ("callback", "adamw", 0.05),
    ("callback", "sgd", None),
    *[("fsdp2", name, clip) for name in ("sgd", "adamw") for clip in (None, 0.05)],
]
SUM = {"reduction": "sum", "strategy": PerToken(loss_reduction="sum")}
UNUSED = {"strategy": "ddp_find_unused_parameters_true"}
ADAM = {"optimizer": "adamw"}
EVEN = loader(DATA, BATCH)


class Apart(Manual):
    """Its ranks exchange gradients with a window's last batch alone."""

    apart = True


class Later(Apart):
    """Leaves out batches without labels that count."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        if bool((batch["labels"] != -100).any()) or self.window_ends(batch_idx):
            super().training_step(batch, batch_idx)


class NoSync(Manual):
    """Its ranks exchange no gradients at all."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        with self.trainer.model.no_sync():  # pyright: ignore
            super().training_step(batch, batch_idx)


class TwoHeads(Plain):
    """Short batches go through one head, long ones through the other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.other = nn.Linear(8, 13, dtype=torch.float64)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        head = self.net.head if batch_idx % 2 == 0 else self.other
        hidden = torch.tanh(self.net.embed(batch["ids"]))
        logits = head(hidden).flatten(0, 1)
        return nn.functional.cross_entropy(logits, batch["labels"].flatten())


class HalfSharded(Sharded):
    """The embedding is sharded; the head's gradients stay each rank's own."""

    def configure_model(self) -> None:
        assert self.device_mesh is not None
        fully_shard(self.net.embed, mesh=self.device_mesh["data_parallel"])


class Hook(pl.Callback):
    """Counts how often DDP brings gradients together."""

    number = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.model.register_comm_hook(None, self.counted)

    def counted(self, state, bucket):  # torch refuses other annotations than its own
        self.number += 1
        return allreduce_hook(state, bucket)


def train_hooked(
    rank: int, world: int, front: str, kind: Any, made: Any
) -> tuple[Tensor, int]:
    """Where it ends, and how often gradients were brought together."""
    hook, kind = Hook(), hooked(kind, accumulation_aggregation="mean")
    fitted = fit(rank, world, front, kind, hook, made=made)
    return weights(fitted.lightning_module), hook.number


def train_printing(rank: int, world: int) -> str:
    sys.stdout = io.StringIO()
    fit(rank, world, "mixin", data=EVEN, use_distributed_sampler=True)
    return sys.stdout.getvalue()


def train_ddp(rank: int, world: int, front: str, how: Any, ddp: Any) -> Tensor:
    backend = DDPStrategy(process_group_backend="gloo", **ddp)
    return train(rank, world, front, {"strategy": backend, "data": EVEN, **how})


class Announced(Stream):
    """Says that it yields eight, and does not."""

    def __len__(self) -> int:
        return 8


def train_stream(
    rank: int, world: int, numbers: list[int], kind: Any = Stream, **options: Any
) -> int:
    if not options and len(set(numbers)) > 1:  # nobody will come
        refusals.PATIENCE = timedelta(seconds=0.4)
    batches = [pad(DATA[2 * i : 2 * i + 2]) for i in range(numbers[rank])]
    data = DataLoader(kind(batches), batch_size=None)
    return fit(rank, world, "callback", data=data, **options).global_step


def train_limited(rank: int, world: int, numbers: list[int]) -> int:
    return train_stream(rank, world, numbers, limit_train_batches=4)


def train_lists(rank: int, world: int, numbers: list[int]) -> None:
    fit(rank, world, "callback", data=loader(DATA[: 4 * numbers[rank]], BATCH))


# ---- the cases of one start of two ranks, and of three ----------------------------


def of_grid(front: str, optimizer: str, clip: float | None) -> Any:
    how: dict[str, Any] = {"made": {"optimizer": optimizer}, "gradient_clip_val": clip}
    if front == "fsdp2":
        front, how = "callback", {**how, **SHARDED}
    return train, front, how


STATIC: dict[str, Any] = {"static_graph": True}
SHARDED: dict[str, Any] = {"kind": Sharded, "split": 1}
HALF: dict[str, Any] = {"kind": HalfSharded, "split": 1}
MEAN: dict[str, Any] = {"made": {"options": {"aggregation": "mean"}}}
TWO: dict[Any, Any] = {
    **{case: of_grid(*case) for case in GRID},
    "plain fsdp2": (train, "plain", SHARDED),
    "tensor parallel": (train, "callback", {**SHARDED, "split": 2}),
    "half auto": (train, "callback", HALF),
    "half mean": (train, "callback", {**HALF, **MEAN}),
    "plain": (train, "plain", {}),
    "sum": (train, "callback", {"made": SUM}),
    0: (train, "callback", {"data": silenced(2, 0)}),
    1: (train, "callback", {"data": silenced(2, 1)}),
    "two heads": (train, "callback", {"kind": TwoHeads, **UNUSED}),
    "by hand": (train_hooked, "plain", Manual, ADAM),
    "apart": (train_hooked, "plain", Apart, ADAM),
    "later": (train, "plain", {"kind": Later, "made": ADAM, "data": LATER}),
    "no sync": (train, "plain", {"kind": NoSync}),
    "gan": (train, "plain", {"kind": Gan, "window": 1, **UNUSED}),
    "printed": (train_printing,),
    "static graph, 2": (train_ddp, "callback", {}, STATIC),
    "static graph, 1": (train_ddp, "callback", {"window": 1}, STATIC),
    "equal streams": (train_stream, [5, 5]),
    "cut streams": (train_limited, [4, 6]),
    "lists": (train_lists, [3, 5]),
}
THREE: dict[Any, Any] = {
    "mixin": (train, "mixin", {}),
    "callback": (train, "callback", {}),
    "plain": (train, "plain", {}),
    2: (train, "callback", {"data": silenced(3, 2)}),
    "lists": (train_lists, [5, 3, 5]),
}
