"""What a forward may do is right or refused by name, also when it changes later."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.core.tape import between, odd, traps
from tests.core.tape.cases import images
from tests.core.tape.common import EXACT, NAIVE, gradients, off_by, state, summed
from trainkit import exact_batch_norm
from trainkit.errors import TrainkitError

X = images(9)


def seed(net: Any, number: int = 7) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)
    for held in (net, getattr(net, "part", None)):
        if held is not None and hasattr(held, "generator"):
            held.generator = torch.Generator().manual_seed(number)


def losses(own: Any, net: Any, x: Tensor = X) -> Tensor:
    """Of the output, and of what the forward has left in attributes."""
    total = summed([net(x)])
    left = [getattr(own, "aux", None), *getattr(own, "listed", [])]
    left += getattr(own, "named", {}).values()
    for each in left:
        total = total + (0 if each is None else each.square().sum())
    return total


def step(own: Any, net: Any, x: Tensor = X) -> list[Tensor]:
    """The gradients and buffers of a step."""
    seed(own)
    own.zero_grad()
    losses(own, net, x).backward()
    return [*gradients(own), *state(own)]


def compare(make: Any) -> None:
    """A step in chunks is the big batch's, and chunks apart are not."""
    own, big, apart = make(), make(), make()
    wanted = step(big, big)
    assert off_by(step(own, exact_batch_norm(own, size=4)), wanted) <= EXACT
    for part in X.split(4):
        seed(apart)
        losses(apart, apart, part).backward()
        if hasattr(apart, "listed"):
            apart.listed.clear()
    assert off_by(gradients(apart), gradients(big)) > NAIVE / 2


# ---- between two layers --------------------------------------------------------------


@pytest.mark.parametrize("name", between.RIGHT)
def test_what_is_done_between_layers_is_right(name: str) -> None:
    compare(lambda: between.made(between.RIGHT[name]))


def test_a_parameter_of_no_module_gets_its_gradient() -> None:
    found = []
    for size in (9, 4):
        between.FOREIGN.grad = None
        own = between.made(between.RIGHT["foreign"])
        step(own, exact_batch_norm(own, size=size))
        found.append(between.FOREIGN.grad)
    assert off_by(found[1:], found[:1]) <= EXACT


@pytest.mark.parametrize("name", between.REFUSED)
def test_what_cannot_be_repeated_is_refused(name: str) -> None:
    said, way = between.REFUSED[name]
    own = between.made(way)
    with pytest.raises((TrainkitError, TypeError), match=said):
        step(own, exact_batch_norm(own, size=4))
    between.KEPT.clear()
    assert torch.autograd.Function.apply.__func__.__qualname__ == "Function.apply"


# ---- nets ----------------------------------------------------------------------------

REFUSED = {
    "GivenAway": "gets a function or a module",
    "Hooked": "register_hook",
    "OnValues": "__bool__",
    "Alias": "view from before a BatchNorm",
    "BatchMean": "mean .* one value of all rows",
    "Raising": "__bool__",
}
ROWS_DRAW = ["TorchDraws", "Checkpointed"]
TRAPS = [
    name
    for name, each in vars(traps).items()
    if name.startswith("with_")
    or (isinstance(each, type) and issubclass(each, traps.Trap))
]


@pytest.mark.parametrize("name", sorted({*TRAPS} - REFUSED.keys() - {*ROWS_DRAW}))
def test_nets_with_traps_are_right(name: str) -> None:
    if name == "Autocast":  # half precision within is not the big batch's
        own, big = traps.made(name), traps.made(name)
        found, wanted = step(own, exact_batch_norm(own, size=4)), step(big, big)
        assert off_by(found, wanted) <= 1e-3
    elif name == "CheckpointedLayer":  # torch moves its statistics twice
        own, big = traps.made(name), traps.made("Trap")
        found, wanted = step(own, exact_batch_norm(own, size=4)), step(big, big)
        assert off_by(found, wanted) <= EXACT
    elif name == "OtherNorms":  # most of it does not see other rows
        own, big = traps.made(name), traps.made(name)
        found, wanted = step(own, exact_batch_norm(own, size=4)), step(big, big)
        assert off_by(found, wanted) <= EXACT
    else:
        compare(lambda: traps.made(name))


@pytest.mark.parametrize("name", REFUSED)
def test_nets_with_traps_are_refused(name: str) -> None:
    own = traps.made(name)
    with pytest.raises(TrainkitError, match=REFUSED[name]):
        step(own, exact_batch_norm(own, size=4))


class Drops(traps.Trap):
    """Layers and functions that draw for each row."""

    def __init__(self) -> None:
        super().__init__()
        layers = nn.Dropout(0.3), nn.Dropout2d(0.3, True), nn.AlphaDropout(0.2)
        self.layers = nn.Sequential(*layers, nn.RReLU())

    def between(self, x: Tensor) -> Tensor:
        half = torch.bernoulli(torch.full_like(x, 0.5))
        return self.layers(x * 1) + half * torch.empty_like(x).uniform_()


@pytest.mark.parametrize("name", [*ROWS_DRAW, "Drops"])
def test_what_rows_draw_is_drawn_again_in_the_backward_pass(name: str) -> None:
    """The gradient is the slope of the loss, with the same random states before it."""
    torch.manual_seed(0)
    own: Any = Drops().double() if name == "Drops" else traps.made(name)
    net = exact_batch_norm(own, size=4)
    step(own, net)
    after = torch.rand(1)
    ways = [torch.randn_like(p) for p in own.parameters()]
    wanted = sum(
        (p.grad * w).sum() for p, w in zip(own.parameters(), ways, strict=True)
    )
    found = []
    with torch.no_grad():
        for shift in (1e-6, -2e-6):
            for parameter, way in zip(own.parameters(), ways, strict=True):
                parameter += shift * way
            seed(own)
            found.append(summed([net(X)]))
    assert torch.rand(1) == after
    assert abs((found[0] - found[1]) / 2e-6 - wanted) <= 1e-7 * abs(wanted)


# ---- what changes between two batches ------------------------------------------------

LATER = {
    "sum_in_place": "tensor of all chunks",
    "view_in_place": "tensor of all chunks",
    "backward_hook": "two has backward hooks",
    "backward_hook_of_leaf": r"two\.0 has backward hooks",
}


def two_steps(name: str, size: int) -> list[list[Tensor]]:
    torch.manual_seed(0)
    case = odd.CASES[name]
    own: Any = case.make() if name == "double" else case.make().double()
    net, found = exact_batch_norm(own, size=size), []
    odd.GLOBAL.update(scale=1.0, is_on=False)
    for number in range(2):
        if number:
            case.change(own)
        found.append(step(own, net, X.to(own.fc.weight.dtype)))
    return found


@pytest.mark.parametrize("name", sorted(odd.CASES.keys() - LATER.keys()))
def test_the_second_batch_is_right(name: str) -> None:
    found, wanted = two_steps(name, 4), two_steps(name, 9)
    limits = [1e-5, 1e-6] if name == "double" else [EXACT, EXACT]
    for one, other, limit in zip(found, wanted, limits, strict=True):
        assert off_by(one, other) <= limit


@pytest.mark.parametrize("name", LATER)
def test_what_changes_later_is_refused(name: str) -> None:
    with pytest.raises(TrainkitError, match=LATER[name]):
        two_steps(name, 4)


def test_rows_that_see_each_other_later_are_found() -> None:
    """Calls 1, 2, 4, 8, ... are checked."""
    own = between.made(lambda net, x: x.flip(0) if net.listed else x)
    net = exact_batch_norm(own, size=4)
    for number in range(1, 9):
        if number == 5:
            own.listed.append(1)
        if number < 8:
            net(X)
    with pytest.raises(TrainkitError, match="see each other"):
        net(X)
