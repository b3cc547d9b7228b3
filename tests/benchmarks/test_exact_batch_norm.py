"""The benchmark of exact BatchNorm compares like with like."""

from __future__ import annotations

import pytest
import torch

from tests.benchmarks.exact_batch_norm import (
    KINDS,
    Step,
    deviation,
    draw,
    map_bytes,
    peak_and_traffic,
    small_resnet,
)
from tests.helpers import NAIVE


def step(kind: str, window: int) -> Step:
    torch.manual_seed(0)
    return KINDS[kind](small_resnet(), draw(window), 4)


@pytest.mark.parametrize("kind", ["device", "flat"])
def test_exact_batch_norm_gives_the_big_batch_s_gradient(kind: str) -> None:
    assert deviation(kind, 4, 14) < 1e-12
    assert deviation("plain", 4, 14) > NAIVE


def test_segments_hold_one_micro_batch_whatever_the_window() -> None:
    (small, _), (large, _) = (peak_and_traffic(step("flat", n)) for n in (16, 48))
    assert large <= 1.15 * small
    one, three = (peak_and_traffic(step("device", n))[0] for n in (16, 48))
    assert three > 1.8 * one
    plain, _ = peak_and_traffic(step("plain", 48))
    assert large <= 1.3 * plain


def test_traffic_is_as_the_page_says() -> None:
    """In segments what crosses a layer, and its gradient, is put once, and it is got
    twice and its gradient once; here each value is used by one later segment."""
    _, traffic = peak_and_traffic(step("flat", 48))
    maps = map_bytes(small_resnet(), draw(48))
    assert traffic["got"] == pytest.approx(1.5 * traffic["put"], rel=0.05)
    assert traffic["put"] == pytest.approx(3.77 * maps, rel=0.05)
