"""Nets that a tracer may misunderstand are right in segments, or do not run so."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.core.joins.cases import images
from tests.core.joins.common import EXACT, engines_of, gradients, off_by, state, summed
from tests.core.joins.steps import SIZES
from tests.core.joins.traps import made
from trainkit import TrainkitError, exact_batch_norm

IN_SEGMENTS = [
    "Trap",
    "NoGrad",
    "Teacher",
    "EnabledAgain",
    "OwnFunction",
    "Detached",
    "Changing",
    "Listed",
    "OwnWeight",
    "Rewritten",
    "OtherNorms",
    "with_lora",
    "with_weight_norm",
    "with_tied_weights",
]
NOT_IN_SEGMENTS = {
    "Autocast": "changes autocast",
    "Alias": "changed in place",
    "OnValues": "OnValues: TraceError",
    "OnShape": "OnShape: TraceError",
    "GivenAway": "body is given to a function",
    "with_parametrized_layer": "Trap.two.1: its weight or bias is no parameter",
}
DRAWING = {
    "TorchDraws": "",
    "Checkpointed": "",
    "PythonDraws": "draws random numbers",
    "NumpyDraws": "draws random numbers",
    "FixedDraws": "draws random numbers",
    "OwnGenerator": "draws random numbers",
}


def seed(net: Any) -> None:
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    if hasattr(net, "generator"):
        net.generator.manual_seed(3)


def step(own: nn.Module, net: Any, door: str) -> None:
    seed(own)
    own.zero_grad()
    if door == "size":
        summed([net(images(9))]).backward()
        return
    for _, loss in net.run(lambda x: summed([net(x)]), images(9).split(SIZES)):
        loss.backward()


def big(name: str) -> nn.Module:
    net = made(name)
    seed(net)
    summed([net(images(9))]).backward()
    return net


def install(own: nn.Module, door: str, memory: Any) -> Any:
    return exact_batch_norm(own, size=4 if door == "size" else None, memory=memory)


def check_same(one: nn.Module, other: nn.Module, at_most: float = EXACT) -> None:
    assert off_by(gradients(one), gradients(other)) <= at_most
    assert off_by(state(one), state(other)) <= at_most


@pytest.mark.parametrize("door", ["size", "run"])
@pytest.mark.parametrize("memory", ["device", "flat"])
@pytest.mark.parametrize("name", [*IN_SEGMENTS, *NOT_IN_SEGMENTS])
def test_the_gradient_is_the_big_batchs(name: str, memory: str, door: str) -> None:
    own = made(name)
    net = install(own, door, memory)
    said: Any = contextlib.nullcontext()
    if memory == "flat" and name in NOT_IN_SEGMENTS:
        said = pytest.warns(UserWarning, match=NOT_IN_SEGMENTS[name])
    with said:
        step(own, net, door)
    # Half precision within is not the big batch's to the last digit.
    check_same(own, big(name), 1e-3 if name == "Autocast" else EXACT)
    (engine,) = engines_of(net)
    assert engine.is_flat == (memory == "flat" and name in IN_SEGMENTS)


@pytest.mark.filterwarnings("ignore:.*its forward draws random numbers")
@pytest.mark.filterwarnings("ignore:.*cannot run in segments")
@pytest.mark.parametrize("door", ["size", "run"])
@pytest.mark.parametrize("name", DRAWING)
def test_draws_are_those_of_one_graph(name: str, door: str) -> None:
    nets: dict[str, nn.Module] = {}
    draws = []
    for memory in ("device", "flat"):
        own = nets[memory] = made(name)
        net = install(own, door, memory)
        if (name, door) == ("OwnGenerator", "size"):
            with pytest.raises(TrainkitError, match="a generator of its own"):
                step(own, net, door)
            continue
        for _ in range(2):
            step(own, net, door)
        draws.append((torch.rand(1), random.random(), np.random.rand()))
        (engine,) = engines_of(net)
        assert engine.is_flat == (memory == "flat" and not DRAWING[name])
        assert DRAWING[name] in engine.why_not or memory == "device"
    if draws:
        assert draws[0] == draws[1]
        check_same(nets["flat"], nets["device"])


@pytest.mark.parametrize("memory", ["device", "flat"])
@pytest.mark.parametrize("change", ["act", "scales", "shift", "options", "module"])
def test_what_changes_between_windows_is_seen(change: str, memory: str) -> None:
    name = "Changing" if change == "act" else "Listed"
    own, wanted = made(name), made(name)
    net = install(own, "run", memory)
    step(own, net, "run")
    wanted.load_state_dict(own.state_dict())
    for each in (own, wanted):
        if change == "act":
            each.act = torch.cos
        elif change == "scales":
            each.scales[0] = -3.0
        elif change == "shift":
            each.shift = 0.5
        elif change == "options":
            each.options["power"] = 3
        else:
            each.one[2] = nn.Sigmoid()
    step(own, net, "run")
    summed([wanted(images(9))]).backward()
    check_same(own, wanted)


@pytest.mark.filterwarnings("ignore:.*cannot run in segments")
def test_a_gradient_hook_of_a_value_keeps_the_module_in_one_graph() -> None:
    own = made("Hooked")
    net = install(own, "run", "flat")
    step(own, net, "run")
    check_same(own, big("Hooked"))
    (engine,) = engines_of(net)
    assert not engine.is_flat
    assert engine.why_not.startswith("Hooked: ")
