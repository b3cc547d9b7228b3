"""The benchmarks of the inner cut and of exact BatchNorm compare like with like."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.benchmarks import exact_batch_norm
from tests.benchmarks.inside import NETS, deviation, loss_of, plain
from tests.benchmarks.measuring import Contestant, LiveBytes, Step
from tests.helpers import NAIVE
from trainkit.core.inside.forward import Chunked


class Named(nn.Module):
    """A net that returns a dict."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, rows: Tensor) -> dict[str, Tensor]:
        return {"vectors": self.net(rows)}


def cut_by_name(net: nn.Module, rows: Tensor, chunk: int) -> Step:
    named = Named(net)
    Chunked(named, size=chunk)
    return lambda: loss_of(named(rows)["vectors"]).backward()


@pytest.mark.parametrize("name", NETS)
def test_two_passes_are_the_whole_batch_and_accumulation_is_not(name: str) -> None:
    torch.manual_seed(0)
    assert deviation("inner cut", "whole", name, 14, 4) < 1e-12
    assert deviation("by hand", "whole", name, 14, 4) < 1e-12
    assert deviation("plain", "whole", name, 14, 4) > NAIVE


@pytest.mark.parametrize("name", NETS)
def test_one_graph_of_a_chunk_lives_at_once_also_with_a_dict(name: str) -> None:
    make, draw = NETS[name]
    net, rows = make(), draw(32)
    least = Contestant(plain, net, rows, 4).peak()
    assert Contestant(cut_by_name, net, rows, 4).peak() < 1.2 * least
    assert Contestant(cut_by_name, net, rows, 16).peak() > 1.2 * least


def batch_norm_step(kind: str, window: int) -> Step:
    torch.manual_seed(0)
    data = exact_batch_norm.draw(window)
    return exact_batch_norm.KINDS[kind](exact_batch_norm.small_resnet(), data, 4)


def test_exact_batch_norm_gives_the_big_batch_s_gradient() -> None:
    assert exact_batch_norm.deviation("exact", 4, 14) < 1e-12
    assert exact_batch_norm.deviation("plain", 4, 14) > NAIVE


def test_a_window_holds_one_chunk_however_large_it_is() -> None:
    peak_of = exact_batch_norm.peak_of
    small, large = (peak_of(batch_norm_step("exact", n)) for n in (16, 48))
    assert large <= 1.25 * small
    assert peak_of(batch_norm_step("whole", 48)) > 2 * large


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
