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
from torchmetrics.classification import MulticlassAccuracy as Accuracy

from tests.helpers import VOCABULARY
from tests.lit.fronts import windows_of
from tests.lit.split.common import Split, fit
from trainkit import MicroBatching
from trainkit.lit.split.auto import SizeSearch

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
    """When it runs out; a copy, which a rehearsal has, has enough.

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

    def __deepcopy__(self, memo: Any) -> Memory:
        return Memory()

    def need(self, place: Place, step: int, tokens: int, rows: int) -> None:
        if place != self.place:
            return
        call, self.num_calls = self.num_calls, self.num_calls + 1
        fits = [most for start, most in self.fits.items() if start <= step]
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
    """A split module with such a memory.

    Attributes:
        ran: how many padded tokens the micro-batch has that runs.
    """

    ran = 0

    def __init__(self, memory: Memory | None = None, **how: Any) -> None:
        super().__init__(**how)
        self.memory = memory or Memory()

    def need(self, place: Place, batch: Any) -> None:
        ids = batch["ids"]
        self.memory.need(place, self.trainer.global_step, ids.numel(), len(ids))

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.trainer.training:
            self.need("transfer", batch)
        return batch

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.ran = batch["ids"].numel()
        loss = self.loss_of(batch)
        self.need("forward", batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.need("log", batch)
        return _InBackward.apply(loss, lambda: self.need("backward", batch))


def starting_at(size: int) -> type[SizeSearch]:
    """A search that begins with another size: with a large one nothing is searched."""

    class Starting(SizeSearch):
        def begin(self, whole: int) -> int:
            self.limit = self.limit or size
            return self.limit

    return Starting


class Cuts(pl.Callback):
    """Writes down the padded tokens of each micro-batch, by loader batch."""

    def __init__(self) -> None:
        self.sizes: list[list[int]] = []

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        self.sizes.append([])

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        self.sizes[-1].append(pl_module.ran)


class Rich(Short):
    """It has what a window can change before its step, one of a kind."""

    def __init__(self, memory: Memory | None = None, **how: Any) -> None:
        super().__init__(memory, **how)
        self.norm = nn.BatchNorm1d(VOCABULARY, dtype=torch.float64)
        self.drop = nn.Dropout(0.3)
        self.called = MeanMetric()
        made: Any = {
            kind: Accuracy(VOCABULARY, average=kind) for kind in ("micro", "macro")
        }
        self.collection = MetricCollection(made)
        self.register_buffer("moving", torch.zeros(()))
        self.tensor, self.number = torch.zeros(()), 0
        self.recent: deque[int] = deque(maxlen=3)
        self.history: dict[str, list[float]] = {"drawn": []}

    def loss_of(self, batch: Any) -> Tensor:
        tokens = batch["ids"].numel()
        self.moving = 0.9 * self.moving + tokens  # another tensor in the buffer's place
        self.tensor += tokens
        self.number += tokens
        self.recent.append(tokens)
        drawn = random.random() + np.random.rand() + float(torch.rand(()))
        self.history["drawn"].append(drawn)
        self.made_late = getattr(self, "made_late", 0) + 1
        hidden = self.drop(torch.tanh(self.net.embed(batch["ids"])))
        logits = self.norm(self.net.head(hidden).flatten(0, 1))
        labels = batch["labels"].flatten()
        loss = nn.functional.cross_entropy(logits, labels)
        self.called(loss.detach().float())
        keep = labels != -100
        found = self.collection(logits[keep].detach(), labels[keep])
        self.log("step", found["micro"], on_step=True, on_epoch=False)
        self.log_exact("exact", loss.detach(), batch)
        self.log("called", self.called, on_step=False, on_epoch=True)
        self.log_dict(self.collection, on_step=False, on_epoch=True)  # type: ignore[arg-type]
        self.log("tokens", float(tokens), on_epoch=True, reduce_fx="sum")
        return loss

    def state(self) -> list[Any]:
        """All of it, and what the generators would yield next."""
        numpy: Any = np.random.get_state()
        return [
            *(each.clone() for each in self.state_dict().values()),
            *(self.tensor, self.number, self.recent, self.history),
            getattr(self, "made_late", 0),
            *(self.called.update_count, self.called.mean_value.clone()),
            self.collection["micro"].metric_state,
            *(random.getstate()[1][:8], numpy[1][:8], torch.get_rng_state()),
        ]


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
        self.seen.append(plain([pl_module.state(), dict(trainer.callback_metrics)]))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.seen.append(plain(dict(trainer.callback_metrics)))


def states(cut: MicroBatching, memory: Memory | None = None, **how: Any) -> Any:
    """All that the windows of a `Rich` have changed, and the size that was found."""
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)
    fitted = fit(Rich(memory, cut=cut), seen := States(), max_epochs=1, **how)
    return seen.seen, windows_of(fitted).micro_batch_size
