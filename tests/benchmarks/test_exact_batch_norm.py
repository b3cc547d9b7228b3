"""The benchmark of exact BatchNorm compares like with like."""

from __future__ import annotations

import torch

from tests.benchmarks.exact_batch_norm import (
    KINDS,
    Step,
    deviation,
    draw,
    peak_of,
    small_resnet,
)
from tests.helpers import NAIVE


def step(kind: str, window: int) -> Step:
    torch.manual_seed(0)
    return KINDS[kind](small_resnet(), draw(window), 4)


def test_exact_batch_norm_gives_the_big_batch_s_gradient() -> None:
    assert deviation("exact", 4, 14) < 1e-12
    assert deviation("plain", 4, 14) > NAIVE


def test_a_window_holds_one_chunk_however_large_it_is() -> None:
    small, large = (peak_of(step("exact", n)) for n in (16, 48))
    assert large <= 1.25 * small
    assert peak_of(step("whole", 48)) > 2 * large
