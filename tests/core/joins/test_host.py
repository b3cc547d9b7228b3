"""Tensors that wait on the host, by a simulated GPU."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Collection
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.core.joins.simulated import CPU, SimulatedStreams
from trainkit.core.joins import host
from trainkit.core.joins.host import MOST, OnHost, transport_to
from trainkit.core.joins.transport import OnDevice
from trainkit.errors import TrainkitError

WAITS = {
    ("out", "main"): "a copy to the host waits until its tensor is computed",
    ("main", "out"): "a tensor's memory is not used again before it is copied",
    ("back", "main"): "memory is copied into when it is no longer used otherwise",
    ("main", "back"): "what is used has arrived",
    ("back", "out"): "nothing is copied back before it was copied to the host",
}


def faults(
    seed: int, ignores: Collection[tuple[str, str]] = (), num_computing: int = 1
) -> int:
    """What goes wrong in a program of random puts, gets, fetches and drops."""
    draw = random.Random(seed)
    streams = SimulatedStreams(
        seed, at_once=False, ignores=ignores, num_computing=num_computing
    )
    transport = OnHost(streams, CPU, most=draw.choice([1, 2, 4]), least=0)  # type: ignore[arg-type]
    kept: list[tuple[Any, float]] = []
    held: list[Tensor] = []
    one: Any = None
    for number in range(60):
        streams.now = draw.choice(streams.computing)
        action = draw.choice(["put", "put", "get", "get", "fetch", "drop", "hold"])
        if action == "put":
            made = streams.new(number)
            kept.append((transport.put(made), number))
            if draw.random() < 0.3:
                assert transport.put(made.view(4, 2)) is kept[-1][0]
            del made
        elif action == "hold":
            held = [streams.new(-1) for _ in range(draw.choice([0, 3]))]
        elif kept:
            which = draw.randrange(len(kept))
            one, value = kept[which]
            if action == "get":
                streams.expect(transport.get(one), value)
            elif action == "fetch":
                transport.fetch([one])
            else:
                del kept[which]
            one = None
    for one, value in kept:
        streams.expect(transport.get(one), value)
    del one, kept, held, transport
    gc.collect()
    streams.finish()
    return streams.faults


@pytest.mark.parametrize("num_computing", [1, 2])
def test_values_are_right_in_whatever_order_streams_run(num_computing: int) -> None:
    assert sum(faults(seed, num_computing=num_computing) for seed in range(300)) == 0


@pytest.mark.parametrize("wait", WAITS, ids=WAITS.values())
def test_each_wait_is_needed(wait: tuple[str, str]) -> None:
    # One computing stream waits for each copy to the host before it asks for it back.
    num_computing = 2 if wait == ("back", "out") else 1
    assert any(faults(seed, [wait], num_computing) for seed in range(60))


def test_pinned_memory_is_held_while_it_is_copied_into(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class HoldsNothing(host._Copy):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self._host = None

    monkeypatch.setattr(host, "_Copy", HoldsNothing)
    assert any(faults(seed) for seed in range(60))


def test_a_fetch_that_nobody_gets_is_waited_for_where_its_memory_is_freed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host._Copy, "__del__", lambda self: None)
    assert any(faults(seed) for seed in range(60))


# ---- what is held --------------------------------------------------------------------


def storages_of(transport: OnHost, number: int) -> int:
    """The most tensors that live at once, when many are put one after the other."""
    alive: set[int] = set()
    most = 0
    for n in range(number):
        made = torch.full((32, 32), float(n))
        alive.add(n)
        weakref.finalize(made.untyped_storage(), alive.discard, n)
        kept = transport.put(made)
        del made, kept
        most = max(most, len(alive))
    return most


def test_few_tensors_are_held_on_the_device_while_they_are_copied() -> None:
    assert storages_of(OnHost(SimulatedStreams(), CPU), 50) == MOST  # type: ignore[arg-type]
    unbounded = OnHost(SimulatedStreams(), CPU, most=100)  # type: ignore[arg-type]
    assert storages_of(unbounded, 50) == 50


class Allocating(SimulatedStreams):
    """Notes what is allocated on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Any] = []

    def empty_on_device(self, like: Tensor) -> Tensor:
        found = super().empty_on_device(like)
        self.made.append(weakref.ref(found.untyped_storage()))
        return found

    @property
    def num_alive(self) -> int:
        return sum(each() is not None for each in self.made)


def filled(transport: OnHost, number: int) -> list[Any]:
    """As many as are no longer held on the device."""
    kept = [transport.put(torch.full((32, 32), float(n))) for n in range(number + MOST)]
    return kept[:number]


def test_what_was_fetched_belongs_to_who_gets_it_or_goes_with_its_handle() -> None:
    streams = Allocating()
    transport = OnHost(streams, CPU)  # type: ignore[arg-type]
    one, two = filled(transport, 2)
    transport.fetch([one, two])
    transport.fetch([one, two])
    assert streams.num_alive == 2  # fetched once
    assert (transport.get(one) == 0).all()
    assert streams.num_alive == 1
    del two
    assert streams.num_alive == 0
    assert (transport.get(one) == 0).all()  # once more, by a copy of its own
    assert len(streams.made) == 3


def test_a_tensor_that_is_still_on_its_way_out_is_not_copied_back() -> None:
    streams = Allocating()
    transport = OnHost(streams, CPU)  # type: ignore[arg-type]
    tensor = torch.randn(32, 32)
    kept = transport.put(tensor)
    transport.fetch([kept])
    assert transport.get(kept).data_ptr() == tensor.data_ptr()
    assert streams.made == []


def test_a_tensor_is_copied_once_while_its_first_handle_lives() -> None:
    streams = SimulatedStreams()
    transport = OnHost(streams, CPU)  # type: ignore[arg-type]
    tensor = torch.randn(32, 32)
    kept = transport.put(tensor)
    assert transport.put(tensor.detach()) is kept
    assert streams.bytes["out"] == tensor.nbytes
    assert transport.put(tensor.t()) is not kept
    del kept
    filled(transport, 1)
    before = streams.bytes["out"]
    again = transport.put(tensor)
    assert streams.bytes["out"] == before + tensor.nbytes
    tensor.add_(1)
    assert transport.put(tensor) is not again


def test_another_tensor_at_the_same_address_is_another() -> None:
    transport = OnHost(SimulatedStreams(), CPU)  # type: ignore[arg-type]
    memory = torch.zeros(32, 32).numpy()
    kept = []
    for number in range(3):
        memory.fill(number)
        tensor = torch.from_numpy(memory)
        kept.append(transport.put(tensor))
        filled(transport, 1)  # so that it is held no more
        del tensor
    assert [float(transport.get(each)[0, 0]) for each in kept] == [0, 1, 2]


def test_a_change_in_place_while_it_is_copied_is_refused() -> None:
    transport = OnHost(SimulatedStreams(), CPU)  # type: ignore[arg-type]
    tensor = torch.randn(32, 32)
    kept = transport.put(tensor)
    tensor.relu_()
    with pytest.raises(TrainkitError, match=r"\[32, 32\].*changed in place"):
        transport.get(kept)
    with pytest.raises(TrainkitError, match=r"\[32, 32\].*changed in place"):
        filled(transport, 1)
    kept = transport.put(tensor)
    del kept  # nobody needs it any more
    tensor.relu_()
    filled(transport, 1)


# ---- layouts -------------------------------------------------------------------------


def given(name: str) -> Tensor:
    images = torch.randn(4, 8, 8, 8, dtype=torch.float64)
    return {
        "contiguous": images,
        "channels last": images.to(memory_format=torch.channels_last),
        "transposed": images.transpose(1, 3),
        "offset": images[1:],
        "expanded": images[:, :1].clone().expand(4, 8, 8, 8),
        "gaps": images[:, ::2],
        "overlapping": images.view(-1).unfold(0, 64, 16),
        "whole numbers": (images * 9).long(),
        "mask": images > 0,
        "scalars": torch.ones(4, 1, 1, 1).expand(4, 64, 8, 8),
    }[name]


@pytest.mark.parametrize(
    ("name", "num_values"),
    [
        ("contiguous", 2048),
        ("channels last", 2048),
        ("transposed", 2048),
        ("offset", 1536),
        ("expanded", 256),
        ("gaps", 1024),
        ("overlapping", 125 * 64),
        ("whole numbers", 2048),
        ("mask", 2048),
        ("scalars", 0),
    ],
)
def test_each_layout_comes_back(name: str, num_values: int) -> None:
    streams = SimulatedStreams()
    transport = OnHost(streams, CPU, least=1024)  # type: ignore[arg-type]
    tensor = given(name)
    kept = transport.put(tensor)
    filled(transport, 1)
    before = streams.bytes["back"]
    found = transport.get(kept)
    assert torch.equal(found, tensor)
    assert streams.bytes["back"] - before == num_values * tensor.element_size()
    if name not in ("gaps", "overlapping"):
        assert found.stride() == tensor.stride()


def test_small_tensors_stay_and_hold_no_large_one() -> None:
    streams = SimulatedStreams()
    transport = OnHost(streams, CPU)  # type: ignore[arg-type]
    large = torch.randn(64, 64)
    whole = weakref.ref(large.untyped_storage())
    row, small = large[3].clone(), torch.ones(3)
    kept, other = transport.put(large[3]), transport.put(small)
    del large
    assert whole() is None
    assert torch.equal(transport.get(kept), row)
    assert transport.get(other) is not None
    assert sum(streams.bytes.values()) == 0


def test_what_is_there_anyway_stays_and_so_do_its_views() -> None:
    streams = SimulatedStreams()
    weight = torch.nn.Parameter(torch.randn(64, 64))
    transport = OnHost(streams, CPU, [weight])  # type: ignore[arg-type]
    for tensor in (weight, weight.t(), weight.detach()[1:]):
        assert transport.get(transport.put(tensor)).data_ptr() == tensor.data_ptr()
    assert streams.bytes["out"] == 0
    transport.put(weight + 1)
    assert streams.bytes["out"] == weight.nbytes


def test_only_a_gpu_has_a_host() -> None:
    assert isinstance(transport_to(CPU), OnDevice)
