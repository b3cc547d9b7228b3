"""What cannot be exact is refused by name; an error shows where it was raised."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.core.joins.common import (
    EXACT,
    check_clean,
    engines_of,
    gradients,
    off_by,
    summed,
)
from tests.core.joins.steps import SIZES, X, compare, run, several, simple
from tests.core.tape.cases import made as made_case
from tests.core.tape.nets import pooled
from tests.core.tape.traps import Trap, made
from trainkit.core.joins.exact import exact_batch_norm
from trainkit.errors import TrainkitError

pytestmark = pytest.mark.parametrize("memory", ["device", "flat"])


def notes(error: Any) -> list[str]:
    return error.value.__notes__


def test_checkpoints_around_the_net_are_refused(memory: Any) -> None:
    net = exact_batch_norm(made("Trap"), memory=memory)
    with pytest.raises(TrainkitError, match=r"one\.1: it ran again in a backward pass"):
        run(net, lambda x: summed([checkpoint(net, x, use_reentrant=False)]))


def test_a_loss_that_is_pulled_too_late(memory: Any) -> None:
    net = exact_batch_norm(made("Trap"), memory=memory)
    losses = []
    for _, loss in net.run(simple(net), X.split(SIZES)):
        losses.append(loss)
        if len(losses) < len(SIZES):
            loss.backward()
    with pytest.raises(TrainkitError, match=r"Call backward\(\) in the loop"):
        losses[-1].backward()


def test_losses_that_are_not_pulled(memory: Any) -> None:
    net = exact_batch_norm(made("Trap"), memory=memory)
    with pytest.raises(TrainkitError, match="no gradient has come to the module"):
        list(net.run(simple(net), X.split(SIZES)))
    with torch.no_grad():
        assert len(list(net.run(simple(net), X.split(SIZES)))) == len(SIZES)
    window = net.run(simple(net), X.split(SIZES))
    for _ in SIZES:
        next(window)[1].backward()
    with pytest.warns(UserWarning, match="has stopped before its end"):
        window.close()  # type: ignore[attr-defined]


def test_windows_that_cannot_begin(memory: Any) -> None:
    net = exact_batch_norm(made("Trap"), memory=memory)
    windows = [net.run(simple(net), X.split(SIZES)) for _ in range(2)]
    with pytest.raises(TrainkitError, match="another window of this module"):
        next(zip(*windows, strict=True))
    windows[0].close()  # type: ignore[attr-defined]
    with pytest.raises(TrainkitError, match="received none"):
        list(net.run(simple(net), []))
    net.remove()
    with pytest.raises(TrainkitError, match=r"remove\(\) has given"):
        list(net.run(simple(net), X.split(SIZES)))


def test_an_error_in_a_step(memory: Any) -> None:
    own, ended = made("Trap"), []
    net = exact_batch_norm(own, memory=memory)

    def step(x: Tensor) -> Tensor:
        try:
            out = net(x)
            if len(x) == 2:
                raise KeyError("mine")
            return summed([out])
        finally:
            ended.append(len(x))

    with pytest.raises(KeyError, match="mine") as error:
        run(net, step)
    said = (
        "trainkit | exact BatchNorm: raised in micro-batch 2 of 3, which run in turns"
    )
    assert notes(error) == [said]
    assert ended == SIZES
    assert torch.is_grad_enabled()
    net.remove()
    check_clean(own)
    compare(made("Trap"), simple, memory)


@pytest.mark.filterwarnings("ignore:.*cannot run in segments")
def test_an_error_in_the_net(memory: Any) -> None:
    net = exact_batch_norm(made("Trap"), memory=memory)
    with pytest.raises(RuntimeError, match="to have 3 channels") as error:
        run(net, simple(net), [X[:4], X[4:, :2], X[6:]])
    assert "micro-batch 2 of 3" in notes(error)[0]


def test_an_error_at_a_join_shows_the_line_that_called(memory: Any) -> None:
    own = nn.ModuleDict({"bn": nn.BatchNorm2d(3)}).double()
    net = exact_batch_norm(own, memory=memory)
    caught = []

    def step(x: Tensor) -> Tensor:
        try:
            return own["bn"](x).sum()
        except ValueError as error:
            caught.append(len(x))
            raise error

    with pytest.raises(ValueError, match="expected 4D input"):
        run(net, step, [X[:4, :, 0], X[4:, :, 0]])
    assert caught


def test_micro_batches_that_call_different_modules(memory: Any) -> None:
    own = several()
    net = exact_batch_norm(own, memory=memory)
    with pytest.raises(TrainkitError, match="have come to first and second"):
        run(net, lambda x: own["second" if len(x) == 2 else "first"](x).sum())
    with pytest.raises(TrainkitError, match="have come to second and the end"):
        list(net.run(lambda x: own["second"](x) if len(x) != 3 else x, X.split(SIZES)))


@pytest.mark.filterwarnings("ignore:.*cannot run in segments")
def test_forwards_that_differ(memory: Any) -> None:
    class Differing(Trap):
        def between(self, x: Tensor) -> Tensor:
            return self.two[1](x) if x.shape[0] == 2 else x

    net = exact_batch_norm(Differing().double(), memory=memory)
    with pytest.raises(TrainkitError, match=r"have come to the end and two\.1"):
        run(net, lambda x: pooled(net(x)[:, :, None, None]).sum())


@pytest.mark.filterwarnings("ignore:.*an argument that is no tensor differs")
def test_arguments_that_differ(memory: Any) -> None:
    own, big = made_case("two_in_two_out"), made_case("two_in_two_out")
    net = exact_batch_norm(own, memory=memory)
    run(net, lambda x: summed(net(x, other=x, scale=2.0)))
    summed(big(X, other=X, scale=2.0)).backward()
    assert off_by(gradients(own), gradients(big)) <= EXACT
    own.zero_grad()
    run(net, lambda x: summed(net(x, other=x, scale=float(len(x)))))
    assert not engines_of(net)[0].is_flat
    more = {4: {}, 2: {"scale": 1.0}, 3: {}}
    with pytest.raises(TrainkitError, match="must call Both with the same arguments"):
        run(net, lambda x: summed(net(x, other=x, **more[len(x)])))


def test_one_value_per_channel(memory: Any) -> None:
    own = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double()
    net = exact_batch_norm(own, memory=memory)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        run(net, lambda x: net(x).sum(), [X[:1, :, 0, 0]])
    run(net, lambda x: net(x).sum(), [X[:1, :, 0, 0], X[1:2, :, 0, 0]])


@pytest.mark.parametrize("name", ["Functional", "OwnForward"])
def test_what_cannot_be_exact_is_refused(name: str, memory: Any) -> None:
    match = {
        "Functional": r"functional\.batch_norm",
        "OwnForward": r"one\.1 has a f",
    }
    net = exact_batch_norm(made(name), memory=memory)
    with pytest.raises(TrainkitError, match=match[name]):
        run(net, simple(net))


@pytest.mark.filterwarnings("ignore:.*cannot run in segments")
@pytest.mark.parametrize("where", ["aux", "part.aux", "kept"])
def test_a_graph_left_in_an_attribute_is_refused(where: str, memory: Any) -> None:
    class Part(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.aux = x.square().mean()
            return x

    class Keeping(Trap):
        def __init__(self) -> None:
            super().__init__()
            self.kept: list[Tensor] = []

        def between(self, x: Tensor) -> Tensor:
            self.kept.append(x)
            return x

    own: Any = Keeping().double() if where == "kept" else made("Remembers")
    if where == "part.aux":
        own = made("CountingWithin")
        own.part = Part()
    net = exact_batch_norm(own, memory=memory)
    with pytest.raises(TrainkitError, match=f"tensors with a gradient in {where}"):
        run(net, simple(net))


def test_a_value_that_is_changed_behind_a_layer(memory: Any) -> None:
    own = made("Trap")
    net = exact_batch_norm(own, memory=memory)

    def step(x: Tensor) -> Tensor:
        h = own.one[0](x)
        n = own.one[1](h)
        h.mul_(2)
        return summed([own.fc(pooled(n * h))])

    with pytest.raises(TrainkitError, match="changed in place"):
        run(net, step)
    with pytest.raises(RuntimeError, match="inplace"):
        step(X).backward()
