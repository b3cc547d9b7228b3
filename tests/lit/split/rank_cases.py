"""Trainings on several ranks, many of them in one pair of processes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from tests.helpers import (
    OPTIMIZERS,
    TokenModule,
    TokenNet,
    pad,
    ragged_sequences,
    trainer,
    weights,
)
from tests.lit.fronts import cut as parted
from tests.lit.fronts import windows_of
from tests.lit.split.short_of_memory import Memory, Short
from trainkit import PerSample, PerToken, Weighed
from trainkit.core.split.micro_batching import MicroBatching

SHARES: dict[int, list[tuple[int, ...]]] = {
    2: [(9, 3, 12, 2), (3, 10, 1, 2)],
    3: [(9, 3, 12, 2), (3, 10, 1, 2), (1, 1, 5, 8)],
}
"""Rows in each rank's loader batches: micro-batches of 4 are 3 against 1, and so on."""

WEIGHTS = {"ce": 1.0, "kl": 0.5}


@dataclass
class Case:
    """One training.

    Attributes:
        loss: "tokens", "samples", "terms", "sums", or "said" by `training_step`.
        cut: how.
        window: loader batches.
        silent: the rank whose labels are ignored but for one.
        ddp: options of DDP.
        branches: whether long rows go through a part of their own.
        memory: for each rank.
        norm: whether there is a BatchNorm.
        only_short: the loader batches whose rows are all short.
        metrics: whether a metric object is called.
        naive: plain Lightning, which averages the ranks' means.
        hook: what brings gradients together.
    """

    loss: str = "tokens"
    cut: MicroBatching | None = field(default_factory=lambda: MicroBatching(size=4))
    window: int = 1
    silent: int | None = None
    ddp: dict[str, Any] = field(default_factory=dict)
    optimizer: str = "sgd"
    dtype: torch.dtype = torch.float64
    branches: bool = False
    memory: list[Memory] = field(default_factory=list)
    norm: bool = False
    epochs: int = 1
    only_short: Sequence[int] = ()
    metrics: bool = False
    naive: bool = False
    hook: Any = allreduce_hook


class Branches(nn.Module):
    """Rows of at least ten tokens go through a head of their own."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.net = TokenNet(dtype=dtype)
        self.other = TokenNet(dtype=dtype, seed=2).head

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        is_long = (labels != -100).sum(1) >= 10
        hidden = torch.tanh(self.net.embed(ids))
        logits = self.net.head(hidden)
        if not is_long.any():
            return logits
        return torch.where(is_long[:, None, None], self.other(hidden), logits)


def terms_of(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The sum over tokens, and over samples of the mean square of their logits."""
    ce = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    valid = labels != -100
    return ce, ((logits.square().sum(2) * valid).sum(1) / valid.sum(1).clamp(1)).sum()


class Trained(Short):
    def __init__(self, case: Case, memory: Memory | None) -> None:
        super().__init__(memory, cut=case.cut, dtype=case.dtype)
        self.case, self.optimizer_name = case, case.optimizer
        self.body = Branches(case.dtype) if case.branches else None
        if case.branches:
            del self.net
        self.norm = nn.BatchNorm1d(13, dtype=case.dtype) if case.norm else None
        self.called = MeanMetric() if case.metrics else None
        self.validated: list[Tensor] = []
        self.accumulation = {
            "tokens": PerToken(),
            "samples": PerSample(),
            "sums": PerToken(loss_reduction="sum"),
            "terms": {"ce": PerToken(), "kl": PerSample()},
            "said": Weighed(),
        }[case.loss]

    def logits_of(self, batch: Any) -> Tensor:
        if self.body is not None:
            return self.body(batch["ids"], batch["labels"])
        logits = self.net(batch["ids"])
        if self.norm is not None:
            real = batch["labels"] != -100  # else it would see padding
            logits = logits.masked_scatter(real.unsqueeze(2), self.norm(logits[real]))
        return logits

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.case.loss != "terms":
            return super().training_step(batch, batch_idx)
        self.need("forward", batch)
        ce, kl = self.sums_of(batch)
        count = (batch["labels"] != -100).sum()
        return {"loss": {"ce": ce / count, "kl": 0.5 * kl / len(batch["labels"])}}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.norm is not None:
            assert self.norm.running_mean is not None
            self.validated.append(self.norm.running_mean.clone())

    def sums_of(self, batch: Any) -> tuple[Tensor, Tensor]:
        return terms_of(self.logits_of(batch), self.labels_of(batch))

    def loss_of(self, batch: Any) -> Tensor:
        if self.called is not None:
            self.log("called", self.called(batch["labels"].float()), on_step=True)
        ce, each = self.sums_of(batch)
        if self.case.loss == "samples":
            return each / len(batch["labels"])
        if self.case.loss == "said":
            self.weigh(self.labels_of(batch).ne(-100).sum())
        return ce if self.case.loss == "sums" else ce / self.count_of(batch)

    def count_of(self, batch: Any) -> Tensor:
        return self.labels_of(batch).ne(-100).sum().clamp(min=1)

    def labels_of(self, batch: Any) -> Tensor:
        """Those that the loss counts; "said" leaves out some tokens of the batch."""
        if self.case.loss != "said":
            return batch["labels"]
        return batch["labels"].masked_fill(batch["ids"] % 6 > 1, -100)


def data_of(case: Case, world: int) -> list[list[Any]]:
    """Each rank's sequences."""
    shares, drawn = SHARES[world], iter(ragged_sequences(100))
    data = [[next(drawn) for _ in range(sum(share))] for share in shares]
    for row in data:
        for batch in case.only_short:
            first = sum(shares[data.index(row)][:batch])
            size = shares[data.index(row)][batch]
            row[first : first + size] = [(x[:9], y[:9]) for x, y in row[first:][:size]]
    if case.silent is not None:
        data[case.silent] = [
            (x, y if i == 0 else torch.full_like(y, -100))
            for i, (x, y) in enumerate(data[case.silent])
        ]
    return data


class Hook(pl.Callback):
    """Lets DDP bring gradients together so, which Lightning does on GPUs alone."""

    def __init__(self, hook: Any) -> None:
        self.hook = hook

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.strategy.model.register_comm_hook(None, self.hook)


@dataclass
class Result:
    """Of a rank.

    Attributes:
        weights: at the end.
        steps: taken.
        error: what ended it.
        num_reductions: how often DDP has brought gradients together.
        statistics: BatchNorm's.
        num_failures: how often memory ran out.
        limit: the size that was found.
        validated: BatchNorm's running mean, as validations have seen it.
    """

    weights: Tensor
    steps: int
    error: str
    num_reductions: int
    statistics: list[Tensor]
    num_failures: int
    limit: int | None
    validated: list[Tensor]


def train(rank: int, world: int, case: Case) -> Result:
    memory = copy.deepcopy(case.memory[rank]) if case.memory else Memory()
    module: Any = Trained(case, memory)
    if case.naive:
        module = TokenModule(dtype=case.dtype)
    count: list[int] = []

    def counted(state, bucket):  # torch takes an annotation only as a type
        count.append(bucket.index())
        return case.hook(None, bucket)

    fit = trainer(
        case.window,
        callbacks=[Hook(counted)],
        strategy=DDPStrategy(process_group_backend="gloo", **case.ddp),
        devices=world,
        use_distributed_sampler=False,
        max_epochs=case.epochs,
        num_sanity_val_steps=0,
        limit_val_batches=1 if case.norm else 0,
    )
    data = data_of(case, world)[rank]
    loader: Any = DataLoader(
        data,  # type: ignore[arg-type]
        batch_sampler=parted(data, SHARES[world][rank]),
        collate_fn=pad,
    )
    text = ""
    try:
        fit.fit(module, loader, loader if case.norm else None)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    return Result(
        weights(module),
        fit.global_step,
        text,
        len(count),
        [buffer.double().clone() for buffer in module.buffers()],
        memory.num_failures,
        None if case.naive else windows_of(fit).micro_batch_size,
        [] if case.naive else module.validated,
    )


def train_all(rank: int, world: int, cases: dict[str, Case]) -> dict[str, Result]:
    return {name: train(rank, world, case) for name, case in cases.items()}


def reference(case: Case, world: int) -> tuple[Tensor, Tensor]:
    """Where one process begins, and where it ends with each window as one batch."""
    module = Trained(case, None)
    start, data = weights(module), data_of(case, world)
    optimizer = OPTIMIZERS[case.optimizer](module.parameters())
    for _ in range(case.epochs):
        for samples in samples_of(case, data, SHARES[world]):
            batch = pad(samples)
            optimizer.zero_grad()
            ce, each = module.sums_of(batch)
            count = module.count_of(batch)
            loss = {
                "tokens": ce / count,
                "sums": ce / count,
                "said": ce / count,
                "samples": each / len(samples),
                "terms": ce / count + 0.5 * each / len(samples),
            }[case.loss]
            loss.backward()
            optimizer.step()
    return start, weights(module)


def samples_of(
    case: Case, data: list[list[Any]], shares: list[tuple[int, ...]]
) -> list[list[Any]]:
    windows: list[list[Any]] = []
    for first in range(0, len(shares[0]), case.window):
        window = []
        for own, share in zip(data, shares, strict=True):
            low = sum(share[:first])
            window += own[low : low + sum(share[first : first + case.window])]
        windows.append(window)
    return windows
