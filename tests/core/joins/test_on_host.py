"""Exact BatchNorm on a simulated GPU, whose tensors wait on the host."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import Tensor, nn

from tests.core.joins.simulated import CPU, SimulatedStreams
from tests.core.test_host_syncs import Waits
from tests.helpers import gradients
from trainkit.core.joins import engine
from trainkit.core.joins.exact import exact_batch_norm
from trainkit.core.joins.host import OnHost, _Handle
from trainkit.core.joins.joint_graph import meet, normalised
from trainkit.core.joins.transport import OnDevice
from trainkit.core.ranks import Ranks

BOTH = pytest.mark.parametrize("memory", ["device", "flat"])


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.two = nn.Conv2d(width, width, 3, padding=1)
        self.last = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.one(x)).relu_()
        return (x + self.last(self.two(y))).relu()


class Net(nn.Module):
    """Two blocks with skip connections; the second has a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.blocks = nn.Sequential(Block(8), Block(8))
        self.blocks[1].two.weight.requires_grad_(False)  # type: ignore[union-attr]
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.norm(self.first(x)).relu()).mean((2, 3)))


def net_and_images(rows: int = 14) -> tuple[Net, Tensor]:
    torch.manual_seed(0)
    net = Net().double()
    return net, torch.randn(rows, 3, 6, 6, dtype=torch.float64)


def loss_of(vectors: Tensor) -> Tensor:
    return (vectors.softmax(1).mean(0) - torch.arange(5) / 10).square().sum()


class Noting(OnHost):
    """Notes what it keeps, and what was asked for too late.

    Attributes:
        on_time: how many tensors were on their way back when they were needed.
        late: how many were not.
        alive: for each time a tensor was needed, how many were kept.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.on_time = self.late = 0
        self.alive: list[int] = []
        self._handles: WeakSet[Any] = WeakSet()

    @property
    def num_kept(self) -> int:
        return len(self._handles)

    def put(self, tensor: Tensor) -> Any:
        found = super().put(tensor)
        if isinstance(found, _Handle):
            self._handles.add(found)
        return found

    def get(self, kept: Any) -> Tensor:
        if isinstance(kept, _Handle):
            self.alive.append(self.num_kept)
            if not kept.put.is_held_for(self._streams.current()):
                self.on_time += kept.back is not None
                self.late += kept.back is None
        return super().get(kept)


def on_host(
    monkeypatch: pytest.MonkeyPatch, ignores: Collection[tuple[str, str]] = ()
) -> tuple[SimulatedStreams, list[Noting]]:
    streams, made = SimulatedStreams(ignores=ignores), []

    def transport_to(device: Any, stays: Any) -> OnHost:
        made.append(Noting(streams, CPU, stays, most=2, least=256))
        return made[-1]

    monkeypatch.setattr(engine, "transport_to", transport_to)
    return streams, made


def gradient(net: nn.Module, images: Tensor, memory: Any, *, cut: bool) -> Tensor:
    """Of a window in micro-batches of 4, from its second step."""
    exact = exact_batch_norm(net, size=4 if cut else None, memory=memory)
    for _ in range(2):
        net.zero_grad()
        if cut:
            loss_of(exact(images)).backward()
            continue
        for part, loss in exact.run(lambda x: loss_of(net(x)), images.split(4)):
            (loss * len(part) / len(images)).backward()
    return gradients(net)


def whole(net: nn.Module, images: Tensor, *, cut: bool) -> Tensor:
    """The big batch's gradient, of the same loss."""
    for _ in range(2):
        net.zero_grad()
        found = net(images)
        parts = [found] if cut else found.split(4)
        sum(loss_of(x) * len(x) / len(images) for x in parts).backward()  # type: ignore[union-attr]
    return gradients(net)


def off(memory: Any, *, cut: bool) -> float:
    net, images = net_and_images()
    reference = copy.deepcopy(net)
    found = gradient(net, images, memory, cut=cut)
    wanted = whole(reference, images, cut=cut)
    both = [*zip(net.buffers(), reference.buffers(), strict=True), (found, wanted)]
    return float(
        torch.stack([(x - y).abs().max() / y.abs().max() for x, y in both]).max()
    )


@BOTH
@pytest.mark.parametrize("cut", [False, True])
def test_the_gradient_is_the_big_batch_s(
    memory: Any, cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams, _ = on_host(monkeypatch)
    assert off(memory, cut=cut) < 1e-12
    assert streams.faults == 0
    assert min(streams.bytes.values()) > 0


@BOTH
@pytest.mark.parametrize("wait", [("main", "out"), ("main", "back")])
def test_without_a_wait_it_is_not(
    memory: Any, wait: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_host(monkeypatch, [wait])
    assert not off(memory, cut=True) < 1e-12


@BOTH
def test_tensors_are_on_their_way_back_when_they_are_needed(
    memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, made = on_host(monkeypatch)
    net, images = net_and_images(40)
    gradient(net, images, memory, cut=True)
    last = made[-1]
    assert last.on_time > 100
    assert last.late <= 0.1 * last.on_time


@BOTH
def test_nothing_is_kept_when_the_gradients_are_there(
    memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, made = on_host(monkeypatch)
    net, images = net_and_images()
    exact = exact_batch_norm(net, size=4, memory=memory)
    loss_of(exact(images)).backward()
    last = made[-1]
    assert last.num_kept == 0
    assert last.alive[-1] <= 0.25 * max(last.alive)  # it went as it was used


def test_segments_keep_no_value_that_their_backward_pass_does_not_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, made = on_host(monkeypatch)
    net, images = net_and_images()
    exact = exact_batch_norm(net, size=4, memory="flat")
    exact(images)
    found = exact(images)
    all_ = made[-1].num_kept
    with torch.no_grad():
        exact(images)
    assert made[-1].num_kept == 0
    for each in (net.first, net.norm, net.blocks[0]):
        each.requires_grad_(False)
    exact(images)
    found = exact(images)
    assert made[-1].num_kept == all_ * 5 / 7  # the first two convolutions' are not
    loss_of(found).backward()
    assert made[-1].num_kept == 0


@pytest.mark.parametrize("runs_once", [False, True])
def test_a_layer_s_meeting_keeps_what_a_second_backward_pass_needs(
    runs_once: bool,
) -> None:
    layer, x = nn.BatchNorm1d(3), torch.randn(6, 3, requires_grad=True)
    _, (found,) = meet(layer, "norm", [x], Ranks(), OnDevice(), runs_once=runs_once)
    loss = normalised(layer, x, *found).pow(3).sum()
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    (wanted,) = torch.autograd.grad(nn.BatchNorm1d(3)(x).pow(3).sum(), x)
    torch.testing.assert_close(first, wanted)
    assert any(each is None for each in found[0].kept) == runs_once
    if not runs_once:
        (second,) = torch.autograd.grad(loss, x)
        assert torch.equal(first, second)


@BOTH
def test_outputs_live_until_their_step_has_ended(
    memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, made = on_host(monkeypatch)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1))
    images = torch.randn(32, 3, 8, 8)
    alive: WeakSet[Any] = WeakSet()
    most = 0

    def step(x: Tensor) -> Tensor:
        nonlocal most
        found = net(x)
        alive.add(found.untyped_storage())
        most = max(most, len(alive))
        return found.square().mean()

    exact = exact_batch_norm(net, memory=memory)
    for _, loss in exact.run(step, images.split(4)):
        loss.backward()
        del loss
    assert most <= 4  # on its way, fetched, in use and in the loop
    assert made[-1].num_kept == 0


@BOTH
@pytest.mark.parametrize("cut", [False, True])
def test_a_step_may_call_a_module_with_what_it_gave(
    memory: Any, cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_host(monkeypatch)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.GELU())
    net = net.double()
    images = torch.randn(10, 3, 6, 6, dtype=torch.float64)
    reference = copy.deepcopy(net)
    exact = exact_batch_norm(net, size=4 if cut else None, memory=memory)
    for _ in range(2):
        net.zero_grad()
        if cut:
            exact(exact(images)).pow(3).sum().backward()
            continue
        runs = exact.run(lambda x: net(net(x)).pow(3).sum(), images.split(4))
        for _, loss in runs:
            loss.backward(retain_graph=exact.needs_graph)
    reference(reference(images)).pow(3).sum().backward()
    found, wanted = gradients(net), gradients(reference)
    assert float((found - wanted).norm() / wanted.norm()) < 1e-12


@BOTH
def test_a_window_makes_the_host_wait_for_nothing(
    memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_host(monkeypatch)
    net, images = net_and_images()
    exact = exact_batch_norm(net, size=4, memory=memory)
    for _ in range(2):
        loss_of(exact(images)).backward()
    with (waits := Waits()):
        loss_of(exact(images)).backward()
    # Random states are compared, which are on the host.
    assert set(waits.found) <= {"aten::equal"}
