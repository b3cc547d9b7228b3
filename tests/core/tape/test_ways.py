"""What a forward may do is right or refused by name, also when it changes later."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.core.tape import ways
from tests.core.tape.common import EXACT, gradients, images, off_by, state, summed
from tests.core.tape.refused_ways import DRAWN, REFUSED, Told
from tests.core.tape.ways import FOREIGN, RIGHT, Case
from trainkit import exact_batch_norm
from trainkit.core.inside.rows import Sizes
from trainkit.core.ranks import Ranks
from trainkit.core.tape import forward
from trainkit.core.tape.forward import TapedForward
from trainkit.errors import TrainkitError

X = images(9)


def seed(net: Any, number: int = 7) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)
    if hasattr(net, "generator"):
        net.generator = torch.Generator().manual_seed(number)


def steps(case: Case, size: int | None, *, is_apart: bool = False) -> list[Any]:
    """The gradients and buffers of two steps, between which the net changes.

    Args:
        case: of a net.
        size: of the chunks; None for the big batch.
        is_apart: whether each chunk is normalised by itself.
    """
    own, found = case.make(), []
    net = own if size is None or is_apart else exact_batch_norm(own, size=size)
    ways.GLOBAL.update(is_on=False)
    for number in range(2):
        if number:
            case.change(own)
        own.zero_grad()
        FOREIGN.grad = None
        x = X.to(own.fc.weight.dtype)
        for part in x.split(size or 9) if is_apart else [x]:
            seed(own)
            summed([net(part)]).backward()
        foreign = torch.zeros(()) if FOREIGN.grad is None else FOREIGN.grad
        found.append([*gradients(own), foreign, *state(own)])
    return found


@pytest.mark.parametrize("name", RIGHT)
def test_both_steps_are_the_big_batch_and_chunks_apart_are_not(name: str) -> None:
    case = RIGHT[name]
    wanted = steps(case, None)
    for one, other in zip(steps(case, 4), wanted, strict=True):
        assert off_by(one, other) <= case.limit
    apart = steps(case, 4, is_apart=True)
    assert off_by(apart[0], wanted[0]) > case.apart


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_repeated_is_refused(name: str) -> None:
    case = REFUSED[name]
    with pytest.raises((TrainkitError, TypeError), match=case.refused):
        steps(case, 4)
    ways.GLOBAL["kept"] = None
    assert torch.autograd.Function.apply.__func__.__qualname__ == "Function.apply"


SILENT = "normed_backward", "straight_through", "reading"


@pytest.mark.parametrize("name", SILENT)
def test_what_few_rows_show_would_be_wrong(name: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(forward, "check", lambda *_: None)
    case = REFUSED[name]
    assert off_by(steps(case, 4)[0], steps(case, None)[0]) > 1e-3


def test_a_layer_in_a_checkpoint_moves_its_statistics_once() -> None:
    """torch moves them twice."""
    case = Case(ways.layer_in_checkpoint, is_whole=True)
    for one, other in zip(steps(case, 4), steps(Case(), None), strict=True):
        assert off_by(one, other) <= EXACT


@pytest.mark.parametrize("name", DRAWN)
def test_what_rows_draw_is_drawn_again_in_the_backward_pass(name: str) -> None:
    """The gradient is the slope of the loss, with the same random states before it."""
    own = DRAWN[name].make()
    net = exact_batch_norm(own, size=4)
    seed(own)
    summed([net(X)]).backward()
    after = torch.rand(1)
    used = [p for p in own.parameters() if p.grad is not None]
    ways_there = [torch.randn_like(p) for p in used]
    pairs = list(zip(used, ways_there, strict=True))
    wanted = torch.stack([(p.grad * way).sum() for p, way in pairs]).sum()
    found: list[Tensor] = []
    with torch.no_grad():
        for shift in (1e-6, -2e-6):
            for parameter, way in pairs:
                parameter += shift * way
            seed(own)
            found.append(summed([net(X)]))
    assert torch.rand(1) == after
    assert abs((found[0] - found[1]) / 2e-6 - wanted) <= 1e-7 * abs(wanted)


def test_rows_that_see_each_other_later_are_found() -> None:
    """Calls 1, 2, 4, 8, ... are checked."""
    own = Case(lambda net, x: x.flip(0) if ways.GLOBAL["is_on"] else x).make()
    net = exact_batch_norm(own, size=4)
    for number in range(1, 8):
        ways.GLOBAL["is_on"] = number >= 5
        net(X)
    with pytest.raises(TrainkitError, match="see each other"):
        net(X)


def test_one_value_for_each_channel_is_refused_as_torch_does() -> None:
    with pytest.raises(TrainkitError, match="more than 1 value per channel"):
        TapedForward(nn.BatchNorm1d(4), Sizes(), Ranks(), "net")(torch.randn(1, 4))


class Casting(nn.Module):
    """In float32, to which its forward casts; in float64 that would fail."""

    def __init__(self, act: Any) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 5), nn.BatchNorm1d(5)
        self.last, self.act = nn.Linear(5, 3), act

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x)).relu().float()
        return self.last(Told.apply([self.act], hidden))


@pytest.mark.parametrize(
    ("act", "is_right"), [(lambda g: 2 * g, True), (lambda g: g - g.mean(0), False)]
)
def test_a_forward_that_casts_is_compared_in_float64(act: Any, is_right: bool) -> None:
    """Its gradients would not be compared else."""
    torch.manual_seed(0)
    module, rows = Casting(act), torch.randn(24, 6)
    whole = copy.deepcopy(module)
    net = exact_batch_norm(module, size=8)
    if not is_right:
        with pytest.raises(TrainkitError, match="see each other"):
            net(rows)
        return
    for each in (net, whole):
        each(rows).exp().mean().backward()
    assert off_by(gradients(module), gradients(whole)) < 1e-5


def test_a_forward_that_asks_for_its_own_type_is_compared_in_it() -> None:
    class Asking(nn.BatchNorm1d):
        def forward(self, input: Tensor) -> Tensor:
            assert input.dtype is torch.float32
            return super().forward(input)

    assert exact_batch_norm(Asking(4), size=4)(torch.randn(10, 4)).isfinite().all()
