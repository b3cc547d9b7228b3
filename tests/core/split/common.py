"""Batches for the tests of cutting: nested in any way, or ragged and padded."""

from __future__ import annotations

import dataclasses
import random
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from transformers import BatchEncoding

Side = Literal["right", "left", "mixed"]

DISTRIBUTIONS: dict[str, Callable[[random.Random], float]] = {
    "log-normal": lambda draw: min(1024, draw.lognormvariate(5, 0.9)),
    "uniform": lambda draw: draw.randint(1, 1024),
    "cubed-uniform": lambda draw: 1024 * draw.random() ** 3,
}


def window(name: str, draw: random.Random, num_rows: int = 64) -> list[int]:
    """The lengths of a window's rows."""
    return [max(1, int(DISTRIBUTIONS[name](draw))) for _ in range(num_rows)]


def mask_of(
    lengths: Sequence[int], *, side: Side = "right", padded_length: int | None = None
) -> Tensor:
    """1 where a row is no padding; mixed rows have it on both sides, in turn."""
    width = padded_length or max(lengths)
    mask = torch.zeros(len(lengths), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        free = width - length
        before = {"right": 0, "left": free, "mixed": free * (row % 3) // 2}[side]
        mask[row, before : before + length] = 1
    return mask


def ragged(lengths: Sequence[int], *, side: Side = "right") -> dict[str, Any]:
    """Ids from 1 to 8, 0 in the padding; labels of -100 there."""
    mask = mask_of(lengths, side=side)
    ids = torch.randint(1, 9, mask.shape, generator=torch.Generator().manual_seed(0))
    labels = ((3 * ids + 1) % 9).masked_fill(mask == 0, -100)
    return {"ids": ids * mask, "attention_mask": mask, "labels": labels}


# ---- nested --------------------------------------------------------------------------

X = torch.arange(12.0).view(6, 2)
Y = torch.tensor([1, 2, -100, 3, -100, 4])


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


OldPair = namedtuple("OldPair", ["x", "y"])


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Tensor
    y: Any
    note: str = "n"


@dataclasses.dataclass
class Checked:
    y: Tensor
    total: int = dataclasses.field(init=False, default=6)


class Encoding(UserDict):
    """A mapping that holds its data in an attribute, and more beside it."""

    def __init__(self, data: Any = None, *, note: str = "") -> None:
        super().__init__(data)
        self.note = note


NESTED: dict[str, tuple[Any, str | int]] = {
    "dict": ({"x": X, "y": Y}, "y"),
    "ordered dict": (OrderedDict(y=Y, x=X), "y"),
    "default dict": (defaultdict(list, x=X, y=Y), "y"),
    "user dict": (Encoding({"x": X, "y": Y}, note="kept"), "y"),
    "BatchEncoding": (BatchEncoding({"x": X, "y": Y}), "y"),
    "read-only mapping": (MappingProxyType({"x": X, "y": Y}), "y"),
    "int keys": ({0: X, 1: Y}, 1),
    "int keys by string": ({0: X, 1: Y}, "1"),
    "tuple": ((X, Y), 1),
    "tuple by string": ((X, Y), "1"),
    "list": ([X, Y], 1),
    "negative index": ((X, Y), -1),
    "named tuple": (Pair(X, Y), "y"),
    "named tuple by index": (Pair(X, Y), 1),
    "old named tuple": (OldPair(X, Y), "y"),
    "frozen dataclass": (Frozen(X, Y, "kept"), "y"),
    "dataclass with its own fields": (Checked(Y), "y"),
    "dict of dict": ({"x": X, "of": {"y": Y}}, "of.y"),
    "dict of tuple": ({"x": X, "of": (X, Y)}, "of.1"),
    "tuple of dict": ((X, {"y": Y}), "1.y"),
    "dataclass of named tuple": (Frozen(X, Pair(X, Y), "kept"), "y.y"),
    "deep": ({"a": [Pair(X, Y), {"b": (Frozen(X, 3), X)}], "y": Y}, "a.0.y"),
}
"""Batches of six rows, and where the labels are in each."""
