"""Segments follow what changes between windows, and what tracing cannot see."""

from __future__ import annotations

import copy
import random
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tests.core.joins.cases import images
from tests.core.joins.common import EXACT, engines_of, gradients, off_by, state, summed
from tests.core.joins.nets import pooled
from tests.core.joins.odd import CASES, GLOBAL, ONE, Leaf, Odd, setting, writing
from tests.core.joins.steps import SIZES
from tests.core.joins.traps import Positive, Trap, made
from trainkit import exact_batch_norm
from trainkit.errors import TrainkitError


def seed(net: Any, number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)
    if isinstance(getattr(net, "part", None), Leaf):
        net.part.generator = torch.Generator().manual_seed(number)


def window(own: Any, net: Any, door: str) -> None:
    x = images(9, own.fc.weight.dtype)
    if door == "run":
        for _, loss in net.run(lambda part: summed([net(part)]), x.split(SIZES)):
            loss.backward()
    else:
        summed([net(x)]).backward()


def two_windows(name: str, door: str, memory: Any) -> tuple[list[Any], Any]:
    """The gradients and buffers of both windows, and what ran."""
    torch.manual_seed(0)
    case = CASES[name]
    own: Any = case.make() if name == "double" else case.make().double()
    net = own
    if memory != "big":
        net = exact_batch_norm(own, size=4 if door == "size" else None, memory=memory)
    GLOBAL.update(scale=1.0, is_on=False)
    found = []
    for number in range(2):
        if number:
            case.change(own)
        seed(own, number)
        own.zero_grad()
        window(own, net, "size" if memory == "big" else door)
        found.append((gradients(own), state(own)))
    return found, net


@pytest.mark.filterwarnings("ignore:.*cannot run in segments")
@pytest.mark.filterwarnings("ignore:.*its forward leaves values")
@pytest.mark.filterwarnings("ignore:.*hooks of")
@pytest.mark.filterwarnings("ignore:.*its forward draws random numbers")
@pytest.mark.parametrize("door", ["size", "run"])
@pytest.mark.parametrize("name", CASES)
def test_the_second_window_is_right(name: str, door: str) -> None:
    case = CASES[name]
    if (name, door) == ("own_generator", "size"):
        with pytest.raises(TrainkitError, match="a generator of its own"):
            two_windows(name, door, "flat")
        return
    found, net = two_windows(name, door, "flat")
    wanted, _ = two_windows(name, door, "device" if case.draws else "big")
    (engine,) = engines_of(net)
    assert engine.is_flat == (not case.why), engine.why_not
    assert case.why in engine.why_not
    single = 1e-5 if name == "double" else EXACT  # it begins in single precision
    for one, other, limit in zip(found, wanted, [single, EXACT], strict=True):
        assert off_by(one[0], other[0]) <= limit
        assert off_by(one[1], other[1]) <= single


def first_and_second(memory: Any, first: Any, second: Any, own: Any = None) -> Any:
    """Two windows of two micro-batches, whose arguments are given."""
    torch.manual_seed(0)
    own = own or Arguments().double()
    net = exact_batch_norm(own, memory=memory)
    parts = images(8).split(4)
    for given in (first, second):
        own.zero_grad()
        steps = net.run(
            lambda pair: summed([net(pair[0], **pair[1])]),
            list(zip(parts, given, strict=True)),
        )
        for _, loss in steps:
            loss.backward()
    return own, engines_of(net)[0]


class Arguments(Trap):
    def forward(self, x: Tensor, k: Any = 1.0, extra: Any = None) -> Any:
        x = self.one(x) * float(k[500] if isinstance(k, np.ndarray) else k)
        if extra is not None:
            x = x + extra
        return self.fc(pooled(self.two(x)))


TABLE = np.ones(2000)
OTHER_TABLE = np.where(np.arange(2000) == 500, 3.0, 1.0)
EXTRA = torch.ones(4, 1, 1, dtype=torch.float64)
ARGUMENTS = {
    "number": ([{"k": 1.0}] * 2, [{"k": 1.0}, {"k": 0.3}], "no tensor differs"),
    "tensor_later": (
        [{"extra": None}] * 2,
        [{"extra": None}, {"extra": EXTRA}],
        "a tensor in some micro-batches",
    ),
    "none_later": (
        [{"extra": EXTRA}] * 2,
        [{"extra": EXTRA}, {"extra": None}],
        "a tensor in some micro-batches",
    ),
    "array": ([{"k": TABLE}] * 2, [{"k": OTHER_TABLE}] * 2, "an argument is a ndarray"),
    "other_number": ([{"k": 1.0}] * 2, [{"k": 0.3}] * 2, ""),
}


@pytest.mark.filterwarnings("ignore:.*cannot run in segments")
@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_are_looked_at_in_each_window(name: str) -> None:
    first, second, why = ARGUMENTS[name]
    own, engine = first_and_second("flat", first, second)
    wanted, _ = first_and_second("device", first, second)
    assert why in engine.why_not
    assert engine.is_flat == (not why)
    assert off_by(gradients(own), gradients(wanted)) <= EXACT


@pytest.mark.parametrize("memory", ["device", "flat"])
def test_a_gradient_of_one_micro_batch_alone(memory: Any) -> None:
    own, big = made("Trap"), made("Trap")
    whole = images(9).requires_grad_()
    summed([big(whole)]).backward()
    net = exact_batch_norm(own, memory=memory)
    parts = list(images(9).split(SIZES))
    parts[1].requires_grad_()
    for _, loss in net.run(lambda x: summed([net(x)]), parts):
        loss.backward()
    assert engines_of(net)[0].is_flat == (memory == "flat")
    assert parts[1].grad is not None
    assert whole.grad is not None
    assert off_by([parts[1].grad], [whole.grad.split(SIZES)[1]]) <= EXACT


class InPlaceOnInput(Trap):
    def forward(self, x: Tensor) -> Any:
        x.sub_(0.5)
        y = self.one[0](x)
        first = y[:, :2]
        h = self.two(y.tanh())
        y = y.mul_(2)
        return self.fc(pooled(self.one[1](y).tanh() + torch.cat([first, h[:, 2:]], 1)))


@pytest.mark.filterwarnings("ignore:.*cannot run in segments")
def test_an_argument_that_is_changed_in_place_is_changed_once() -> None:
    torch.manual_seed(0)
    own, x = InPlaceOnInput().double(), images(9)
    parts = [each.clone() for each in x.split(SIZES)]
    big = copy.deepcopy(own)
    whole = x.clone()
    summed([big(whole)]).backward()
    net = exact_batch_norm(own, memory="flat")
    for _, loss in net.run(lambda part: summed([net(part)]), parts):
        loss.backward()
    assert not engines_of(net)[0].is_flat
    assert torch.equal(torch.cat(parts), whole)
    assert off_by(gradients(own), gradients(big)) <= EXACT


def test_an_argument_that_is_changed_in_a_later_window_is_refused() -> None:
    GLOBAL["is_on"] = False
    own = nn.Sequential(Leaf(writing), Trap()).double()
    net = exact_batch_norm(own, memory="flat")

    def step() -> None:
        for _, loss in net.run(lambda x: summed([net(x)]), images(9).split(SIZES)):
            loss.backward()

    step()
    GLOBAL["is_on"] = True
    with pytest.raises(TrainkitError, match="changes an argument in place"):
        step()


@pytest.mark.parametrize("memory", ["device", "flat"])
def test_an_output_may_be_complex(memory: Any) -> None:
    class Complex(Trap):
        def forward(self, x: Tensor) -> Any:
            z = torch.fft.rfft2(self.one[0](x))
            return super().forward(x), z

    def loss_of(found: Any) -> Tensor:
        return summed([found[0], torch.view_as_real(found[1])])

    torch.manual_seed(0)
    own = Complex().double()
    big = copy.deepcopy(own)
    loss_of(big(images(9))).backward()
    net = exact_batch_norm(own, memory=memory)
    for _, loss in net.run(lambda x: loss_of(net(x)), images(9).split(SIZES)):
        loss.backward()
    assert engines_of(net)[0].is_flat == (memory == "flat")
    assert off_by(gradients(own), gradients(big)) <= EXACT


def test_cached_weights() -> None:
    own, big = made("Trap"), made("Trap")
    for net in (own, big):
        for part in (net.fc, net.two[0]):
            parametrize.register_parametrization(part, "weight", Positive())
    net = exact_batch_norm(own, memory="flat")

    def step(net: Any) -> Any:
        def of(x: Tensor) -> Tensor:
            with parametrize.cached():
                return summed([net(x)])

        return of

    for _ in range(2):
        own.zero_grad()
        for _, loss in net.run(step(net), images(9).split(SIZES)):
            loss.backward()
    step(big)(images(9)).backward()
    assert engines_of(net)[0].is_flat
    assert off_by(gradients(own), gradients(big)) <= EXACT


def test_the_same_segments_run_where_nothing_changes() -> None:
    own: Any = Odd(lambda net, x: x * net.scale, scale=1.0).double()
    net = exact_batch_norm(own, memory="flat")
    seen = []
    for number in range(40):
        own.scale = 1.0 + number % 3 if number < 9 else float(number)
        for _, loss in net.run(lambda x: summed([net(x)]), images(9).split(SIZES)):
            loss.backward()
        seen.append(set(map(id, engines_of(net)[0].programs.known)))
    assert len(seen[8]) == 3
    assert len(seen[39]) == 16


@pytest.mark.filterwarnings("ignore:.*hooks are registered for all modules")
def test_hooks_for_all_modules_run() -> None:
    own, big = made("Trap"), made("Trap")
    net = exact_batch_norm(own, memory="flat")
    register = nn.modules.module.register_module_forward_hook
    handle = register(lambda m, a, out: 2 * out if m in (own.one, big.one) else None)
    try:
        summed([big(images(9))]).backward()
        for _, loss in net.run(lambda x: summed([net(x)]), images(9).split(SIZES)):
            loss.backward()
    finally:
        handle.remove()
    assert not engines_of(net)[0].is_flat
    assert off_by(gradients(own), gradients(big)) <= EXACT


def test_other_threads_run_modules_while_a_window_is_traced() -> None:
    net, seen = exact_batch_norm(made("Trap"), memory="flat"), []
    other, x = nn.Sequential(nn.Linear(3, 3), nn.ReLU()).double(), torch.ones(2, 3)
    ends = threading.Event()

    def run() -> None:
        while not ends.is_set():
            seen.append(other(x.double()))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        for _ in range(5):
            for _, loss in net.run(lambda x: summed([net(x)]), images(9).split(SIZES)):
                loss.backward()
    finally:
        ends.set()
        thread.join()
    assert engines_of(net)[0].is_flat
    assert all(type(each) is Tensor for each in seen)


@pytest.mark.filterwarnings("ignore:.*a tensor that trains")
def test_a_tensor_that_trains_elsewhere_is_not_left_without_a_gradient() -> None:
    own: Any = Odd(lambda net, x: x * net.plain, plain=torch.ones(4, 1, 1)).double()
    net = exact_batch_norm(own, memory="flat")
    for number in range(2):
        for _, loss in net.run(lambda x: summed([net(x)]), images(9).split(SIZES)):
            loss.backward()
        assert engines_of(net)[0].is_flat == (number == 0)
        own.plain.requires_grad_()


@pytest.mark.filterwarnings("ignore:.*cannot run in segments")
def test_attributes_keep_no_values_of_a_tracing() -> None:
    own: Any = Odd(setting, buffer=ONE, seen=[1], last=None).double()
    net = exact_batch_norm(own, memory="flat")
    with pytest.raises(TrainkitError, match="must not move buffers .* it moved buffer"):
        list(net.run(lambda x: summed([net(x)]), images(9).split(SIZES)))
    assert engines_of(net)[0].why_not == "Odd: its forward sets self.buffer"
    assert type(own.buffer) is Tensor
    assert [type(each) for each in own.seen] == [int, Tensor]
    assert type(own.last) is Tensor
