"""Trainings on several ranks, many of them in one pair of processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from torchmetrics import SumMetric
from torchmetrics.classification import MulticlassF1Score

from tests.helpers import OPTIMIZERS, TokenNet, pad, ragged_sequences, trainer, weights
from tests.lit.fronts import cut as parted
from tests.lit.fronts import windows_of
from tests.lit.split.short_of_memory import Memory, Short, starting_at
from tests.zoo.modules import Plain, whole
from trainkit import MicroBatching, PerSample, PerToken, Weighed
from trainkit.lit.split import auto

SHARES: dict[int, list[tuple[int, ...]]] = {
    2: [(9, 3, 12, 2), (3, 10, 1, 2)],
    3: [(9, 3, 12, 2), (3, 10, 1, 2), (1, 1, 5, 8)],
}
"""Rows in each rank's loader batches: micro-batches of 4 are 3 against 1, and so on."""


@dataclass
class Case:
    """One training.

    Attributes:
        loss: "tokens", "samples", "terms", "sums", or "said" by `training_step`.
        cut: how.
        window: loader batches.
        silent: the rank whose labels are ignored but for one.
        ddp: options of DDP; None shards the parameters.
        branches: whether long rows go through a part of their own.
        memory: for each rank.
        norm: whether there is a BatchNorm.
        only_short: the loader batches whose rows are all short.
        metrics: whether a metric object is asked in each step; "sync" if on all ranks.
        naive: plain Lightning, which averages the ranks' means.
        hook: what brings gradients together.
    """

    loss: str = "tokens"
    cut: MicroBatching | None = field(default_factory=lambda: MicroBatching(size=4))
    window: int = 1
    silent: int | None = None
    ddp: dict[str, Any] | None = field(default_factory=dict)
    optimizer: str = "sgd"
    dtype: torch.dtype = torch.float64
    branches: bool = False
    memory: list[Memory] = field(default_factory=list)
    norm: bool = False
    epochs: int = 1
    only_short: Sequence[int] = ()
    metrics: bool | str = False
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


class Trained(Short):
    """Trains a case, and counts what it is shown."""

    def __init__(self, case: Case, memory: Memory | None = None) -> None:
        strategy: Any = {
            "tokens": PerToken(),
            "samples": PerSample(),
            "sums": PerToken(loss_reduction="sum"),
            "terms": {"ce": PerToken(), "kl": PerSample()},
            "said": Weighed(),
        }[case.loss]
        super().__init__(memory, cut=case.cut, dtype=case.dtype, strategy=strategy)
        self.case, self.optimizer_name = case, case.optimizer
        if case.ddp is not None:
            self.accumulation_aggregation = "mean"  # its hook is one's own
        self.body = Branches(case.dtype) if case.branches else None
        if case.branches:
            del self.net
        self.norm: Any = nn.BatchNorm1d(13, dtype=case.dtype) if case.norm else None
        self.metric: Any = None
        if case.metrics:
            options: Any = {"dist_sync_on_step": case.metrics == "sync"}
            self.metric = MulticlassF1Score(13, average="macro", **options)
        self.rows, self.num_steps = SumMetric(), 0
        self.cast = nn.BatchNorm1d(1, affine=False)  # changed by a forward pass alone
        self.validated: list[Tensor] = []

    def configure_model(self) -> None:
        is_done = any(isinstance(p, DTensor) for p in self.parameters())
        if self.case.ddp is None and not is_done:
            assert self.device_mesh is not None
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rows = len(batch["ids"])
        self.num_steps += 1
        self.rows.update(rows)
        self.log("rows", float(rows), reduce_fx="sum", on_step=False, on_epoch=True)
        self.log("counted", self.rows, on_step=False, on_epoch=True)
        count = batch["labels"].ne(-100).sum()
        mean = count if self.case.loss == "sums" else count / rows
        self.log_exact("tokens in a row", mean, weight=rows)
        self.cast(torch.ones(rows + 1, 1))
        if self.case.loss != "terms":
            return super().training_step(batch, batch_idx)
        ce, kl = self.sums_of(batch)
        return {"loss": {"ce": ce / count, "kl": 0.5 * kl / len(batch["labels"])}}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.norm is not None:
            self.validated.append(self.norm.running_mean.clone())

    def on_train_epoch_end(self) -> None:
        if self.metric is not None:
            self.log("metric", self.metric.compute())
            self.metric.reset()

    def sums_of(self, batch: Any) -> tuple[Tensor, Tensor]:
        """The sum over tokens, and over samples of the mean square of their logits."""
        labels = self.labels_of(batch)
        logits: Any = self.body or self.net
        logits = logits(batch["ids"], *([batch["labels"]] if self.body else []))
        valid = batch["labels"] != -100
        if self.norm is not None:  # else it would see padding
            logits = logits.masked_scatter(valid.unsqueeze(2), self.norm(logits[valid]))
        if self.metric is not None:
            self.metric.update(logits[valid].detach(), batch["labels"][valid])
            self.metric.compute()  # where ranks have different numbers of parts
        ce = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        each = (logits.square().sum(2) * valid).sum(1) / valid.sum(1).clamp(1)
        return ce, each.sum()

    def loss_of(self, batch: Any) -> Tensor:
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
    drawn = iter(ragged_sequences(100))
    data = []
    for rank, share in enumerate(SHARES[world]):
        row = [next(drawn) for _ in range(sum(share))]
        for batch in case.only_short:
            first, size = sum(share[:batch]), share[batch]
            row[first : first + size] = [(x[:9], y[:9]) for x, y in row[first:][:size]]
        if case.silent == rank:
            row[1:] = [(x, torch.full_like(y, -100)) for x, y in row[1:]]
        data.append(row)
    return data


@dataclass
class Result:
    """Of a rank: where it ended, and what it was shown.

    Attributes:
        num_reductions: how often DDP has brought gradients together.
        validated: BatchNorm's running mean, as validations have seen it.
        forwards: passes that count, and those that a layer has seen.
    """

    weights: Tensor
    steps: int
    error: str
    num_reductions: int = 0
    statistics: list[Tensor] = field(default_factory=list)
    num_failures: int = 0
    limit: int | None = None
    validated: list[Tensor] = field(default_factory=list)
    forwards: tuple[int, int] = (0, 0)
    samples: list[float] = field(default_factory=list)
    logged: dict[str, float] = field(default_factory=dict)


def train(rank: int, world: int, case: Case) -> Result:
    auto.SizeSearch = starting_at(1000)  # type: ignore[misc]
    memory = replace(case.memory[rank]) if case.memory else Memory()
    module: Any = Trained(case, memory)
    if case.naive:
        module = Plain(dtype=case.dtype)
    count: list[int] = []
    samples: list[float] = []

    def counted(state, bucket):  # torch takes an annotation only as a type
        count.append(bucket.index())
        return case.hook(None, bucket)

    def hook_in(fit: Any, module: Any) -> None:  # which Lightning does on GPUs alone
        if case.ddp is not None:
            fit.strategy.model.register_comm_hook(None, counted)

    def keep(fit: Any, *args: Any) -> None:
        if not case.naive:
            samples.append(float(windows_of(fit).last_window.samples))  # type: ignore[union-attr]

    backend: Any = DDPStrategy(process_group_backend="gloo", **case.ddp or {})
    if case.ddp is None:
        sizes = {"data_parallel_size": world, "tensor_parallel_size": 1}
        backend = ModelParallelStrategy(**sizes, process_group_backend="gloo")  # type: ignore[arg-type]
    hooks = LambdaCallback(on_train_start=hook_in, on_before_optimizer_step=keep)
    how: dict[str, Any] = {"devices": world, "use_distributed_sampler": False}
    how |= {"num_sanity_val_steps": 0, "limit_val_batches": 1 if case.norm else 0}
    how |= {"strategy": backend, "max_epochs": case.epochs, "callbacks": [hooks]}
    fit = trainer(case.window, **how)
    data, share = data_of(case, world)[rank], SHARES[world][rank]
    loader: Any = DataLoader(data, batch_sampler=parted(data, share), collate_fn=pad)  # type: ignore[arg-type]
    try:
        fit.fit(module, loader, loader if case.norm else None)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        return Result(torch.empty(0), fit.global_step, text)
    found = Result(whole(module), fit.global_step, "", len(count), samples=samples)
    if not case.naive:
        found.statistics = [b.double().clone() for b in module.buffers()]
        found.num_failures, found.validated = memory.num_failures, module.validated
        found.limit = windows_of(fit).micro_batch_size
        found.forwards = module.num_steps, int(module.cast.num_batches_tracked)
        found.logged = {k: float(v) for k, v in fit.callback_metrics.items()}
    return found


def train_all(rank: int, world: int, cases: dict[str, Case]) -> dict[str, Result]:
    return {name: train(rank, world, case) for name, case in cases.items()}


def reference(case: Case, world: int) -> tuple[Tensor, Tensor, float | None]:
    """Where one process begins, and where it ends with each window as one batch; and
    what its metric object says then."""
    module = Trained(case)
    start, data = weights(module), data_of(case, world)
    optimizer = OPTIMIZERS[case.optimizer](module.parameters())
    for _ in range(case.epochs):
        if module.metric is not None:
            module.metric.reset()
        for first in range(0, len(SHARES[world][0]), case.window):
            samples = []
            for own, share in zip(data, SHARES[world], strict=True):
                low = sum(share[:first])
                samples += own[low : low + sum(share[first : first + case.window])]
            batch = pad(samples)
            optimizer.zero_grad()
            ce, each = module.sums_of(batch)
            loss = ce / module.count_of(batch)
            each = each / len(samples)
            loss = {"samples": each, "terms": loss + 0.5 * each}.get(case.loss, loss)
            loss.backward()
            optimizer.step()
    metric = None if module.metric is None else float(module.metric.compute())
    return start, weights(module), metric
