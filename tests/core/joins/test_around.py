"""What stands around the calls of a module with BatchNorm, and what comes later."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.core.joins.common import EXACT, gradients, off_by, state, summed
from tests.core.joins.steps import SIZES, X, compare, run, simple
from tests.core.tape.nets import conv_bn, pooled
from tests.core.tape.traps import Trap
from trainkit.core.joins.exact import exact_batch_norm
from trainkit.errors import TrainkitError

pytestmark = pytest.mark.parametrize("memory", ["device", "flat"])


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def without_flash() -> Any:
    before = torch.backends.cuda.flash_sdp_enabled()
    torch.backends.cuda.enable_flash_sdp(not before)
    try:
        yield
    finally:
        torch.backends.cuda.enable_flash_sdp(before)


def test_contexts_over_a_call_stay_with_their_micro_batch(memory: Any) -> None:
    def step(net: Any) -> Any:
        def run_one(x: Tensor) -> Tensor:
            with default_dtype(torch.float64), without_flash():
                return summed([net(x) * torch.ones(1)])

        return run_one

    before = torch.get_default_dtype(), torch.backends.cuda.flash_sdp_enabled()
    compare(Trap().double(), step, memory)
    now = torch.get_default_dtype(), torch.backends.cuda.flash_sdp_enabled()
    assert now == before


def test_random_states_that_are_put_back_over_a_call_are_refused(memory: Any) -> None:
    net = exact_batch_norm(Trap().double(), memory=memory)

    def forked(x: Tensor) -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            out = net(x)
        return summed([out])

    with pytest.raises(TrainkitError, match="random states are kept before"):
        run(net, forked)

    def seeded(x: Tensor) -> Tensor:
        torch.manual_seed(3)
        return summed([net(x + torch.rand(()))])

    run(net, seeded)


def test_inference_mode_around_a_call_is_refused(memory: Any) -> None:
    net = exact_batch_norm(Trap().double(), memory=memory)

    def step(x: Tensor) -> Tensor:
        with torch.inference_mode():
            teacher = net(x)
        return summed([net(x) - teacher])

    with pytest.raises(TrainkitError, match="called in inference mode"):
        run(net, step)
    assert not torch.is_inference_mode_enabled()


def test_outputs_may_be_changed_in_place(memory: Any) -> None:
    def step(net: Any) -> Any:
        def run_one(x: Tensor) -> Tensor:
            out = net(x)
            out /= 2
            out[:, 0] *= 3
            return summed([out])

        return run_one

    compare(Trap().double(), step, memory)


def test_micro_batches_may_share_a_graph(memory: Any) -> None:
    own, shared = Trap().double(), torch.ones(3, 1, 1, requires_grad=True)
    net = exact_batch_norm(own, memory=memory)
    scale = shared.double().exp()
    for _, loss in net.run(lambda x: summed([net(x * scale)]), X.split(SIZES)):
        loss.backward(retain_graph=True)
    found, shared.grad = shared.grad, None
    big = Trap().double()
    big.load_state_dict(own.state_dict())
    summed([big(X * shared.double().exp())]).backward()
    assert off_by([found], [shared.grad]) <= EXACT


class Held:
    def __init__(self, value: Tensor) -> None:
        self.value = value


def test_objects_that_hold_a_graph_are_refused(memory: Any) -> None:
    class Takes(Trap):
        def forward(self, x: Any) -> Any:
            return super().forward(x.value)

    class Gives(Trap):
        def forward(self, x: Tensor) -> Any:
            return Held(super().forward(x))

    pre = nn.Conv2d(3, 3, 1).double()
    takes = exact_batch_norm(Takes().double(), memory=memory)
    with pytest.raises(TrainkitError, match="called with a Held, whose value has a gr"):
        run(takes, lambda x: summed([takes(Held(pre(x)))]))
    gives = exact_batch_norm(Gives().double(), memory="device")
    with pytest.raises(TrainkitError, match="returns a Held, whose value has a grad"):
        run(gives, lambda x: summed([gives(x).value]))


def test_a_gradient_by_another_way_than_the_outputs_is_refused(memory: Any) -> None:
    own, held = Trap().double(), []
    own.two.register_forward_hook(lambda module, given, out: held.append(out))
    net = exact_batch_norm(own, memory="device")

    def step(x: Tensor) -> Tensor:
        out = net(x)
        return summed([out]) + held[-1].square().mean()

    with pytest.raises((TrainkitError, RuntimeError), match="another way|second time"):
        run(net, step)


def test_parameters_of_other_modules_are_refused(memory: Any) -> None:
    stranger = nn.Parameter(torch.ones(4, 1, 1, dtype=torch.float64))

    class Scaled(Trap):
        def between(self, x: Tensor) -> Tensor:
            return x * stranger

    net = exact_batch_norm(Scaled().double(), memory=memory)
    with pytest.raises(TrainkitError, match=r"shape \[4, 1, 1\] that is neither"):
        with contextlib.suppress(UserWarning):
            run(net, simple(net))


@pytest.mark.filterwarnings("ignore:exact BatchNorm. .* cannot run in segments")
def test_a_head_may_change_what_it_gets_in_place(memory: Any) -> None:
    class Head(Trap):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x.mul_(2).relu_())

    torch.manual_seed(2)
    own = nn.ModuleDict({"body": conv_bn(3, 3, nn.Tanh()), "head": Head()}).double()

    def step(both: Any) -> Any:
        return lambda x: summed([both["head"](both["body"](x) + 1)])

    compare(own, step, memory)


def test_buffers_that_move_are_refused(memory: Any) -> None:
    own = Trap().double()
    nn.utils.parametrizations.spectral_norm(own.two[0])
    net = exact_batch_norm(own, memory=memory)
    with pytest.raises(TrainkitError, match=r"must not move buffers or weights.*\._u"):
        run(net, simple(net))


@pytest.mark.parametrize("size", [None, 4])
def test_a_layer_that_comes_later_is_joined(memory: Any, size: Any) -> None:
    own, big = Trap().double(), Trap().double()
    big.load_state_dict(own.state_dict())
    net = exact_batch_norm(own, memory=memory, size=size)

    def step() -> None:
        run(net, simple(net)) if size is None else summed([net(X)]).backward()
        summed([big(X)]).backward()

    step()
    for each in (own, big):
        torch.manual_seed(4)
        each.two = conv_bn(4, 4, nn.Tanh()).double()
    step()
    assert off_by(gradients(own), gradients(big)) <= EXACT
    assert off_by(state(own), state(big)) <= EXACT


def test_a_forward_that_stands_on_a_layer_is_refused(memory: Any) -> None:
    own = Trap().double()
    layer: Any = own.one[1]
    layer.forward = lambda x: F.relu(type(layer).forward(layer, x))
    net = exact_batch_norm(own, memory=memory)
    with pytest.raises(TrainkitError, match=r"one\.1 has a forward of its own"):
        run(net, simple(net))


class Attends(Trap):
    """The gradient of a row has odd strides, which torch's kernel misreads."""

    def forward(self, x: Tensor) -> Any:
        hidden = self.two(self.one(x))
        return self.fc(torch.einsum("bchw,bdhw->bcd", hidden, hidden).mean(1))


def test_micro_batches_of_one_row(memory: Any) -> None:
    own, big = Attends().double(), Attends().double()
    big.load_state_dict(own.state_dict())
    net = exact_batch_norm(own, memory=memory)
    summed([big(X)]).backward()
    run(net, simple(net), X.split(1))
    assert off_by(gradients(own), gradients(big)) <= EXACT


def test_micro_batches_without_rows(memory: Any) -> None:
    own, big = Trap().double(), Trap().double()
    big.load_state_dict(own.state_dict())
    own.fc = big.fc = nn.Identity()  # type: ignore[assignment]
    net = exact_batch_norm(own, memory=memory)
    summed([big(X)]).backward()
    run(net, simple(net), [X[:5], X[:0], X[5:]])
    assert off_by(gradients(own), gradients(big)) <= EXACT
    assert off_by(state(own), state(big)) <= EXACT
    assert pooled(X).shape == (9, 3)
