"""A step that waits for other micro-batches, and what it may do."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.core.joins.common import (
    EXACT,
    check_clean,
    engines_of,
    gradients,
    off_by,
    state,
    summed,
)
from tests.core.joins.steps import SIZES, X, compare, run, several, simple
from tests.core.tape.traps import Checkpointed, Trap, made
from trainkit.core.joins.exact import exact_batch_norm
from trainkit.errors import TrainkitError

pytestmark = pytest.mark.parametrize("memory", ["device", "flat"])


def test_several_modules_one_after_another(memory: str) -> None:
    def step(net: Any) -> Any:
        def of(x: Tensor) -> Tensor:
            h = net["first"](net["pre"](x))
            out = net["bn"](net["second"](h) + net["second"](x).sin())
            return summed([out, h])

        return of

    net = compare(several(), step, memory)
    assert net.needs_graph
    by_name = {each.name: each.is_flat for each in engines_of(net)}
    is_flat = memory == "flat"
    assert by_name == {"first": is_flat, "second": is_flat, "bn": False}


def test_a_call_without_gradients(memory: str) -> None:
    def step(net: Any) -> Any:
        def of(x: Tensor) -> Tensor:
            with torch.no_grad():
                wanted = net["second"](x)
            return summed(
                [net["bn"](net["first"](x).mean((2, 3)).repeat(1, 2)[:, :5]) * wanted]
            )

        return of

    compare(several(), step, memory)


def test_an_output_that_no_loss_uses(memory: str) -> None:
    def step(net: Any) -> Any:
        def of(x: Tensor) -> Tensor:
            net["second"](x)
            return summed([net["first"](x)])

        return of

    compare(several(), step, memory)


def test_hooks(memory: str) -> None:
    own, big, seen = made("Trap"), made("Trap"), []
    for net in (big, own):
        conv = net.one[0]
        conv.register_forward_pre_hook(lambda m, a: seen.append(len(a[0])))
        net.register_forward_hook(lambda m, a, out: 2 * out)
        net.register_forward_pre_hook(lambda m, a: (a[0] + 1,))
        net.fc.weight.register_hook(lambda gradient: 3 * gradient)
        conv.weight.register_post_accumulate_grad_hook(lambda p: seen.append("grad"))
        net.fc.register_full_backward_hook(lambda m, a, out: (5 * a[0],))
    compare(own, simple, memory, big)
    wanted = [9, "grad", *SIZES, "grad"]
    if memory == "flat":  # the first runs once more to compare, and each to recompute
        wanted = [9, "grad", *SIZES, SIZES[0], *reversed(SIZES), "grad"]
    assert seen == wanted


@pytest.mark.filterwarnings("ignore:.*it has forward hooks")
def test_a_forward_hook_within_gets_outputs_with_a_graph(memory: str) -> None:
    own, seen = made("Trap"), []
    conv = own.one[0]
    conv.register_forward_hook(lambda m, a, out: seen.append(out.requires_grad))
    net = compare(own, simple, memory)
    assert seen == [True] * 4
    said = "one.0: it has forward hooks" in engines_of(net)[0].why_not
    assert said == (memory == "flat")


@pytest.mark.filterwarnings("ignore:.*it has hooks, which would not run")
def test_hooks_on_layers(memory: str) -> None:
    own, seen = made("Trap"), []
    own.one[1].register_forward_hook(lambda m, a, out: seen.append(len(out)))
    own.two.register_forward_hook(lambda m, a, out: 2 * out)
    net = compare(own, simple, memory)
    assert seen == [9, *SIZES]
    assert memory == "device" or "two: it has hooks" in engines_of(net)[0].why_not


def test_a_scaler_of_gradients(memory: Any) -> None:
    own, big = made("Trap"), made("Trap")
    simple(big)(X).backward()
    net = exact_batch_norm(own, memory=memory)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)  # type: ignore[attr-defined]
    for _, loss in net.run(simple(net), X.split(SIZES)):
        scaler.scale(loss).backward()
    scaler.unscale_(torch.optim.SGD(own.parameters(), 0.1))
    assert off_by(gradients(own), gradients(big)) <= EXACT


@pytest.mark.parametrize("where", ["around", "in the step", "size"])
def test_half_precision(where: str, memory: Any) -> None:
    wide, x = made("Trap"), X.float()
    simple(wide)(X).backward()
    own, big = made("Trap").float(), made("Trap").float()
    size = 4 if where == "size" else None
    net = exact_batch_norm(own, size=size, memory=memory)
    half = torch.autocast("cpu", torch.bfloat16)

    def step(part: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out = net(part)
        return summed([out.float()])

    with half:
        summed([big(x).float()]).backward()
    if size:
        step(x).backward()
    elif where == "around":
        with half:
            run(net, lambda part: summed([net(part).float()]), x.split(SIZES))
    else:
        run(net, step, x.split(SIZES))
    assert engines_of(net)[0].is_flat == (memory == "flat")
    apart = off_by(gradients(own), gradients(wide))
    assert 1e-3 < apart <= 1.1 * off_by(gradients(big), gradients(wide))


def test_checkpoints_between_layers(memory: str) -> None:
    own = Checkpointed()
    own.body[1] = nn.Identity()
    compare(own.double(), simple, memory)


def test_checkpoints_around_a_layer(memory: Any) -> None:
    own, big = made("CheckpointedLayer"), made("Trap")
    simple(big)(X).backward()
    net = exact_batch_norm(own, memory=memory)
    if memory == "device":
        with pytest.raises(TrainkitError, match=r"two\.1: it ran again in a backward"):
            run(net, simple(net))
        return
    run(net, simple(net))
    assert off_by(gradients(own), gradients(big)) <= EXACT
    assert off_by(state(own), state(big)) <= EXACT


def test_losses_may_be_pulled_later_in_the_loop(memory: Any) -> None:
    own, big = made("Trap"), made("Trap")
    simple(big)(X).backward()
    net = exact_batch_norm(own, memory=memory)
    losses: list[Tensor] = []
    for _, loss in net.run(simple(net), X.split(SIZES)):
        losses.append(loss)
        if len(losses) == 2:
            losses[1].backward()
            losses[0].backward()
        if len(losses) == 3:
            loss.backward()
    assert off_by(gradients(own), gradients(big)) <= EXACT


def test_a_loop_that_stops_early(memory: Any) -> None:
    own, ended = made("Trap"), []
    net = exact_batch_norm(own, memory=memory)

    def step(x: Tensor) -> Tensor:
        try:
            return simple(net)(x)
        finally:
            ended.append(len(x))

    steps: Any = net.run(step, X.split(SIZES))
    next(steps)
    assert ended == SIZES[:1]
    steps.close()
    assert ended == SIZES
    own.load_state_dict(made("Trap").state_dict())
    compare(own, simple, memory)


def test_evaluation_mode(memory: Any) -> None:
    net = compare(made("Trap").eval(), simple, memory)
    assert not engines_of(net)
    cut = exact_batch_norm(made("Trap"), size=4, memory=memory)
    cut.eval()
    assert torch.equal(cut(X), made("Trap").eval()(X))


@pytest.mark.filterwarnings("ignore:.*it returns a weight or buffer")
def test_a_weight_among_the_outputs(memory: str) -> None:
    class Returning(Trap):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Any:
            return super().forward(x), self.scale, self.scale.exp()

    def step(net: Any) -> Any:
        def of(x: Tensor) -> Tensor:
            out, scale, more = net(x)
            return summed([out]) + len(x) * (2 * scale + more)

        return of

    torch.manual_seed(0)
    compare(Returning().double(), step, memory)


@pytest.mark.filterwarnings("ignore:.*it is compiled")
@pytest.mark.parametrize("what", ["net", "block", "conv", "in place"])
def test_compiled_modules(what: str, memory: Any) -> None:
    own, big = made("Trap"), made("Trap")
    simple(big)(X).backward()
    module: Any = own
    if what == "net":
        module = torch.compile(own, backend="eager")
    elif what == "block":
        own.one = torch.compile(own.one, backend="eager")
    elif what == "conv":
        own.one[0] = torch.compile(own.one[0], backend="eager")
    else:
        own.compile(backend="eager")
    net = exact_batch_norm(module, memory=memory)
    run(net, simple(net))
    assert off_by(gradients(own), gradients(big)) <= EXACT
    assert off_by(state(own), state(big)) <= EXACT


@pytest.mark.parametrize("size", [None, 4])
def test_copies(size: Any, memory: Any) -> None:
    own, big = made("Trap"), made("Trap")
    simple(big)(X).backward()
    net = exact_batch_norm(own, size=size, memory=memory)
    if size:
        simple(net)(X).backward()
    else:
        run(net, simple(net))
    own.zero_grad()
    own.load_state_dict(made("Trap").state_dict())
    for make in (copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))):
        for each in (make(own), make(net)):
            if each is net or not size and hasattr(each, "run"):
                run(each, simple(each))
            else:
                simple(each)(X).backward()
            assert off_by(gradients(each), gradients(big)) <= EXACT
            assert own.fc.weight.grad is None
    net.remove()
    check_clean(own)
