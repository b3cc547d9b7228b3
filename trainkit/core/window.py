"""The open window on one rank, and its numbers over all ranks once it has closed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainkit.core.strategies import LossReduction, Weight
from trainkit.errors import TrainkitError

# The columns of a rank's row.
COLUMNS = (
    "loss",
    "bare_loss",
    "weight",
    "divisor",
    "smallest",
    "largest",
    "count",
    "padding",
    "tokens",
    "samples",
)
NUM_COLUMNS = len(COLUMNS)
LOSS, BARE_LOSS, WEIGHT, DIVISOR, SMALLEST, LARGEST, COUNT = range(7)
PADDING, TOKENS, SAMPLES = range(7, NUM_COLUMNS)


class Entry(NamedTuple):
    """A micro-batch of an open window; what is in the host's memory is plain numbers.

    Attributes:
        loss: its loss as the loop reports it.
        divided_by: what the loop had divided the loss by.
        weight: what it weighs.
        applied: by what weight its gradient was really multiplied: a loss of half
            precision rounds it (in bfloat16, 1001 becomes 1000).
    """

    loss: Weight
    divided_by: int
    weight: Weight
    applied: Weight


@dataclass
class Window:
    """One rank's micro-batches in an open window.

    They are kept as they come and added up once, when the window closes. So a step
    costs a few small operations, however many micro-batches it has.

    Attributes:
        reduction: how the losses are reduced; several terms are joined into a sum.
        entries: its micro-batches so far.
        padding: how many tokens were padding, of those that were counted.
        tokens: how many tokens were counted.
        samples: how many samples were counted.
        carried: the row of the micro-batches that a checkpoint has brought back.
        is_open: whether it has a micro-batch, its own or a checkpoint's.
        num_passes: how many backward passes have started from a weighted loss.
        is_torn: whether a backward pass has begun and not ended.
        is_apart: whether the last backward pass left the gradients on DDP's ranks.
    """

    reduction: LossReduction
    entries: list[Entry] = field(default_factory=list)
    padding: Weight = 0
    tokens: Weight = 0
    samples: Weight = 0
    carried: Tensor | None = None
    is_open: bool = False
    num_passes: int = 0
    is_torn: bool = False
    is_apart: bool = False

    @property
    def num_micro_batches(self) -> int:
        """How many micro-batches it has on this rank, with those of a checkpoint."""
        before = 0 if self.carried is None else int(self.carried[COUNT])
        return before + len(self.entries)

    @property
    def applied(self) -> list[Weight]:
        """The weights by which gradients were multiplied."""
        return [entry.applied for entry in self.entries]

    @property
    def known_sums(self) -> tuple[float, float] | None:
        """The sums of `weight` and of `applied`; None if a tensor is among them."""
        if self.carried is not None:
            return None
        weight = applied = 0.0
        for entry in self.entries:
            if isinstance(entry.weight, Tensor) or isinstance(entry.applied, Tensor):
                return None
            weight += entry.weight
            applied += entry.applied
        return weight, applied

    def add(
        self, loss: Weight, weight: Weight, applied: Weight, divided_by: int = 1
    ) -> None:
        """Add a micro-batch, as an `Entry` has it."""
        self.is_open = True
        self.entries.append(Entry(loss, divided_by, weight, applied))

    def carry(self, row: Tensor) -> None:
        """Add the micro-batches that a checkpoint has brought back."""
        self.carried, self.is_open = row, True

    def count(
        self, *, padding: Weight = 0, tokens: Weight = 0, samples: Weight = 0
    ) -> None:
        """Add to the counts that `WindowStats` shows."""
        self.padding += padding
        self.tokens += tokens
        self.samples += samples

    def refuse_torn(self) -> None:
        if self.is_torn:
            raise TrainkitError(
                "window: a backward pass in it has failed, and it is not known how "
                "much of its gradient was added. Call drop() and "
                "optimizer.zero_grad(), and begin the window again."
            )

    def refuse_division(self, *, is_apart: bool) -> None:
        """Refuse to close it where it is not the sum of its micro-batches."""
        self.refuse_torn()
        if self.is_apart and not is_apart:
            raise TrainkitError(
                "finish(): the window's last backward pass ran under no_sync(), so the "
                "ranks' gradients are still apart. Leave no_sync() for the last "
                "micro-batch, its forward pass included."
            )
        if len(self.entries) != self.num_passes:
            raise TrainkitError(
                f"window: {len(self.entries)} losses were weighted, and "
                f"{self.num_passes} backward passes came from them, so a gradient in "
                f"it was weighted twice or not at all. Start each pass once, from the "
                f"loss that was passed on (an override of LightningModule.backward "
                f"must use its argument)."
            )

    def row(self, device: torch.device) -> Tensor:
        """This rank's columns of `WindowStats`, in float64, where ranks exchange
        them."""
        own = self._columns(device)
        if self.carried is not None:
            own = merged(torch.stack([own, self.carried.to(own)]))
        return own

    def _columns(self, device: torch.device) -> Tensor:
        """The row of its own micro-batches. A loss of weight 0 is left out of a mean: a
        mean over nothing is NaN, and NaN * 0 is NaN."""
        counts = len(self.entries), self.padding, self.tokens, self.samples
        if (plain := self._plain_columns()) is not None:
            return vector((*plain, *counts), device)
        by_mean = self.reduction == "mean"
        losses, divided_by, weights, applied = zip(*self.entries, strict=True)
        values, by = vector(losses, device), vector(weights, device)
        if len(set(divided_by)) > 1:
            values = values * vector(divided_by, device)
        elif divided_by[0] != 1:
            values = values * divided_by[0]
        bare = loss = values.sum()
        if by_mean:
            loss = values.where(by != 0, by).dot(by)
        sums = [loss, bare]
        if (known := self.known_sums) is not None:
            rest = (*known, min(weights), max(weights), *counts)
        else:
            sums += [by.sum(), vector(applied, device).sum(), *by.aminmax()]
            rest = counts
        return torch.cat([torch.stack(sums), vector(rest, device)])

    def _plain_columns(self) -> tuple[Any, ...] | None:
        """The columns before the counts; None where a tensor has a part of them."""
        by_mean = self.reduction == "mean"
        loss = bare = weight = divisor = largest = 0.0
        smallest: Any = math.inf
        value: Any
        by: Any
        applied: Any
        for value, divided_by, by, applied in self.entries:
            on_device = isinstance(by, Tensor) or isinstance(applied, Tensor)
            if on_device or isinstance(value, Tensor):
                return None
            value *= divided_by
            bare += value
            if not by_mean or by:
                loss += value * by if by_mean else value
            weight += by
            divisor += applied
            smallest, largest = min(smallest, by), max(largest, by)
        # Of NaN no order is sure; an empty window has no smallest.
        if weight != weight or not self.entries:
            smallest = weight
        return loss, bare, weight, divisor, smallest, largest


def merged(rows: Tensor) -> Tensor:
    """Several rows as one: sums are added up, extremes are taken of all."""
    row = rows[:, :NUM_COLUMNS].sum(0)
    row[SMALLEST] = rows[:, SMALLEST].amin()
    row[LARGEST] = rows[:, LARGEST].amax()
    return row


def quotient(part: Weight, total: Weight) -> Weight:
    """part / total, or 0 if the total is 0."""
    if isinstance(total, Tensor):
        return torch.where(total == 0, 0, part / total)
    if isinstance(part, Tensor):
        return part / total if total else part * 0
    return part / total if total else 0.0


def vector(numbers: Sequence[Weight], device: torch.device) -> Tensor:
    """Numbers and 0-d tensors as one float64 vector; does not wait for any of them."""
    dtype = totals_dtype(device)
    tensors = [each for each in numbers if isinstance(each, Tensor)]
    if not tensors and device.type != "cuda":
        return torch.tensor(numbers, dtype=dtype, device=device)
    if not tensors:
        host = torch.tensor(numbers, dtype=dtype, pin_memory=True)
        return host.to(device, non_blocking=True)
    if len(tensors) == len(numbers) and len({each.device for each in tensors}) == 1:
        return torch.stack(tensors).to(device, dtype)
    return torch.stack([scalar(number, device) for number in numbers])


def read(value: Any) -> Any:
    """The number of a tensor that is in the host's memory, where nothing waits for it;
    any other value as it is."""
    if type(value) is not Tensor or not value.is_cpu or value.numel() != 1:
        return value  # what a subclass does, its class knows
    if value.is_complex():
        return value
    return (value.reshape(()) if value.ndim else value).tolist()


def scalar(number: Weight, device: torch.device) -> Tensor:
    """A number as a float64 0-d tensor, filled on the device rather than copied."""
    dtype = totals_dtype(device)
    if isinstance(number, Tensor):
        return number.detach().reshape(()).to(device, dtype)
    return torch.full((), number, dtype=dtype, device=device)


def totals_dtype(device: torch.device) -> torch.dtype:
    """float64, which counts exactly to 2^53; float32 on Apple's GPUs, which lack it."""
    return torch.float32 if device.type == "mps" else torch.float64


def default_device() -> torch.device:
    """The device for exchanges between ranks, if nothing else shows one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True, eq=False)
class WindowStats:
    """The loss, weights and counts of a window, over all ranks.

    The ranks exchanged them when the window closed. They are 0-d tensors on the device:
    reading one never communicates, and only turning it into a Python number waits.
    """

    table: Tensor
    """One row for each rank."""

    totals: Tensor
    """The table's sums over ranks."""

    reduction: LossReduction = "mean"
    """What the losses are; a `"total"` is not divided."""

    @property
    def weight(self) -> Tensor:
        """The effective batch: the sum of all weights, in float64."""
        return self.totals[WEIGHT]

    @property
    def num_micro_batches(self) -> Tensor:
        """How many micro-batches ran, on all ranks."""
        return self.totals[COUNT].long()

    @property
    def loss(self) -> Tensor:
        """The loss of the window as one batch: its mean, or 0 if it weighs nothing.

        With `loss_reduction="total"` it is the sum.
        """
        if self.reduction == "total":
            return self.totals[LOSS]
        weight = self.weight
        return torch.where(weight == 0, 0, self.totals[LOSS] / weight)

    @property
    def imbalance(self) -> Tensor:
        """The largest weight over the mean weight: 1 if all micro-batches are alike."""
        largest = self.table[:, LARGEST].amax()
        return largest * self.totals[COUNT] / self.weight

    @property
    def padding(self) -> Tensor:
        """The share of tokens that are padding; NaN if they were not counted."""
        return self.totals[PADDING] / self.totals[TOKENS]

    @property
    def samples(self) -> Tensor:
        """How many samples the window had; 0 if they were not counted."""
        return self.totals[SAMPLES]
