"""The benchmark of the inner cut compares like with like."""

from __future__ import annotations

import pytest
import torch

from tests.benchmarks.inside import NETS, deviation
from tests.benchmarks.live_bytes import LiveBytes
from tests.helpers import NAIVE


@pytest.mark.parametrize("name", NETS)
def test_two_passes_give_the_whole_batch_s_gradient_and_accumulation_does_not(
    name: str,
) -> None:
    torch.manual_seed(0)
    assert deviation("inner cut", "whole", name, 14, 4) < 1e-12
    assert deviation("by hand", "whole", name, 14, 4) < 1e-12
    assert deviation("plain", "whole", name, 14, 4) > NAIVE


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
