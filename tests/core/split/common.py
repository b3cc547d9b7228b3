"""Ragged batches, padded on either side, for the tests of cutting."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

Side = Literal["right", "left", "mixed"]


def _log_normal(draw: random.Random) -> int:
    return min(1024, max(1, int(draw.lognormvariate(5, 0.9))))


def _uniform(draw: random.Random) -> int:
    return draw.randint(1, 1024)


def _cubed_uniform(draw: random.Random) -> int:
    return max(1, int(1024 * draw.random() ** 3))


DISTRIBUTIONS: dict[str, Callable[[random.Random], int]] = {
    "log-normal": _log_normal,
    "uniform": _uniform,
    "cubed-uniform": _cubed_uniform,
}


def window(name: str, draw: random.Random, num_rows: int = 64) -> list[int]:
    """The lengths of a window's rows."""
    return [DISTRIBUTIONS[name](draw) for _ in range(num_rows)]


def spans(lengths: Sequence[int]) -> list[tuple[int, int]]:
    return [(0, length) for length in lengths]


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


def ragged(
    lengths: Sequence[int], *, side: Side = "right", seed: int = 0
) -> dict[str, Any]:
    """Ids from 1 to 8, 0 in the padding; labels of -100 there."""
    mask = mask_of(lengths, side=side)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 9, mask.shape, generator=generator) * mask
    labels = ((3 * ids + 1) % 9).masked_fill(mask == 0, -100)
    return {"ids": ids, "attention_mask": mask, "labels": labels}
