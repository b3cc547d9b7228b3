"""A module whose memory runs out where and when it is told to."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from tests.helpers import VOCABULARY
from tests.lit.fronts import plain_token_loss
from tests.lit.split.common import Split

Place = Literal["forward", "backward", "transfer", "log"]


def out_of_memory(place: str = "") -> RuntimeError:
    if place == "transfer":  # the host's allocator
        return RuntimeError(
            "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate "
            "memory: you tried to allocate 1 bytes. Error code 12"
        )
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 bytes.")


@dataclass
class Memory:
    """When it runs out.

    Attributes:
        fits: from a step on, so many padded tokens fit.
        calls: and it runs out in these micro-batches, counted from 0 with those that
            are run again, if they can be cut.
        place: where in them.
        make: the error.
        kind: a class; an object that holds one is not put back, and so it counts all.
    """

    fits: dict[int, int] = field(default_factory=dict)
    calls: Sequence[int] = ()
    place: Place = "forward"
    make: Callable[[str], BaseException] = out_of_memory
    kind: type = object
    num_calls: int = 0
    num_failures: int = 0

    def need(self, place: Place, step: int, tokens: int, rows: int) -> None:
        if place != self.place:
            return
        call, self.num_calls = self.num_calls, self.num_calls + 1
        fits = [tokens for start, tokens in self.fits.items() if start <= step]
        if (call in self.calls and rows > 1) or (fits and tokens > fits[-1]):
            self.num_failures += 1
            raise self.make(place)


class _InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fail: Callable[[], None]) -> Tensor:
        ctx.fail = fail
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.fail()
        return gradients[0], None


class Short(Split):
    """A split module with such a memory."""

    def __init__(self, memory: Memory | None = None, **how: Any) -> None:
        super().__init__(**how)
        self.memory = memory or Memory()

    def need(self, place: Place, batch: Any) -> None:
        if self.is_measured:
            return
        ids = batch["ids"]
        self.memory.need(place, self.trainer.global_step, ids.numel(), len(ids))

    @property
    def is_measured(self) -> bool:
        """Whether it only runs with and without padding, to be compared."""
        splits = (getattr(each, "split", None) for each in self.trainer.callbacks)  # type: ignore[attr-defined]
        return any(split is not None and split.current is None for split in splits)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.trainer.training:
            self.need("transfer", batch)
        return batch

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss_of(batch)
        self.need("forward", batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.need("log", batch)
        return _InBackward.apply(loss, lambda: self.need("backward", batch))

    def loss_of(self, batch: Any) -> Tensor:
        return plain_token_loss(self.net, batch, self.reduction)


class Rich(Short):
    """It has all that a window can change before its step."""

    def __init__(self, memory: Memory | None = None, **how: Any) -> None:
        super().__init__(memory, **how)
        self.norm = nn.BatchNorm1d(VOCABULARY, dtype=torch.float64)
        self.drop = nn.Dropout(0.3)
        self.called = MeanMetric()
        self.collection = MetricCollection(
            {
                average: MulticlassAccuracy(VOCABULARY, average=average)
                for average in ("micro", "macro")
            }
        )
        self.register_buffer("moving", torch.zeros(()), persistent=True)
        self.register_buffer("summed", torch.zeros(()), persistent=True)
        self.seen, self.largest, self.has_begun = 0, 0.0, False
        self.first: int | None = None
        self.tensor = torch.zeros(())
        self.recent: deque[int] = deque(maxlen=3)
        self.history: dict[str, list[int]] = {"tokens": []}
        self.drawn: list[float] = []

    def loss_of(self, batch: Any) -> Tensor:
        tokens = batch["ids"].numel()
        self.count(tokens)
        self.drawn.append(random.random() + np.random.rand() + float(torch.rand(())))
        hidden = self.drop(torch.tanh(self.net.embed(batch["ids"])))
        logits = self.norm(self.net.head(hidden).flatten(0, 1))
        labels = batch["labels"].flatten()
        loss = nn.functional.cross_entropy(logits, labels)
        self.called(loss.detach().float())
        keep = labels != -100
        self.collection(logits[keep].detach(), labels[keep])
        self.log_exact("exact", loss.detach(), batch)
        self.log("called", self.called, on_step=False, on_epoch=True)
        self.log_dict(self.collection, on_step=False, on_epoch=True)  # type: ignore[arg-type]
        self.log("tokens", float(tokens), on_epoch=True, reduce_fx="sum")
        return loss

    def count(self, tokens: int) -> None:
        self.moving = 0.9 * self.moving + tokens  # another tensor in the buffer's place
        self.summed += tokens
        self.tensor += tokens
        self.seen += tokens
        self.largest = max(self.largest, float(tokens))
        self.has_begun = True
        self.first = tokens if self.first is None else self.first
        self.recent.append(tokens)
        self.history["tokens"].append(tokens)
        if not hasattr(self, "made_late"):
            self.made_late = 0
        self.made_late += 1

    def state(self) -> dict[str, Any]:
        """All of it, as plain values, and what the generators would yield next."""
        own = {
            name: value
            for name, value in vars(self).items()
            if name in ("seen", "largest", "has_begun", "first", "made_late", "tensor")
        }
        return (
            own
            | {
                "weights": [p.detach().clone() for p in self.parameters()],
                "buffers": {n: b.clone() for n, b in self.named_buffers()},
                "containers": (list(self.recent), list(self.history["tokens"])),
                "drawn": list(self.drawn),
                "called": (self.called.update_count, self.called.compute()),
                "collection": self.collection["micro"].metric_state,
                "random": (
                    random.getstate()[1][:8],
                    np.random.get_state()[1][:8],  # type: ignore[index]
                    torch.get_rng_state()[:64],
                ),
            }
        )


def plain(value: Any) -> Any:
    """The same without tensors, to the last bit."""
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | deque):
        return [plain(each) for each in value]
    return value.tolist() if isinstance(value, Tensor | np.ndarray) else value


class States(pl.Callback):
    """Writes the state down after each loader batch, and what is logged."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        state = pl_module.state() if isinstance(pl_module, Rich) else {}
        self.seen.append(plain([state, dict(trainer.callback_metrics)]))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.seen.append(plain(dict(trainer.callback_metrics)))


def seeded() -> None:
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)
