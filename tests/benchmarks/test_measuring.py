"""The memory that benchmarks and tests of memory count."""

from __future__ import annotations

import torch

from tests.benchmarks.measuring import LiveBytes


def test_live_bytes_are_those_that_live_at_once() -> None:
    given = torch.ones(256)  # 1 KiB, which was there before
    with LiveBytes() as live:
        one = given + 1
        two = one.view(16, 16)
        del one, two
        given.mul_(2)
        three = [given + 1, given + 2]
    assert live.peak == 2 * 1024
    with LiveBytes() as again:
        del three
        given.exp().exp()
    assert again.peak == 2 * 1024
