"""The accumulator in a plain loop: its rules; the host waits for nothing of its own."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.core.common import (
    CASES,
    GivenWeight,
    Toy,
    big_batch,
    cut,
    fresh_net,
    read_nothing,
    relative,
    run_open,
    run_window,
    waiting_is_an_error,
)
from tests.helpers import gradients, ragged_sequences, token_loss
from trainkit import Accumulator, NoiseMoments, PerSample, PerToken, TrainkitError

SAMPLES = ragged_sequences(10)
PARTS = cut(SAMPLES, (3, 7))
ROWS = torch.randn(4, 2)


def fails(loss: Tensor) -> None:
    raise RuntimeError("out of memory")


# ---- what equals the law -------------------------------------------------------------


def test_dropped_window_leaves_no_trace() -> None:
    """transformers#22098: nothing of one epoch's tail in the next one's first step."""
    net, accumulator = fresh_net(), Accumulator(PerToken())
    run_open(accumulator, net, PARTS)
    assert accumulator.is_open
    assert accumulator.drop() == 2
    assert not accumulator.is_open
    net.zero_grad()
    stats = run_window(net, PARTS[:1], accumulator)
    assert stats.num_micro_batches == 1
    assert relative(gradients(net), big_batch(fresh_net(), PARTS[0])[0]) <= 1e-12


def test_two_windows_side_by_side_share_no_totals() -> None:
    """One loss of a discriminator and one of a generator for each batch."""
    one, other = Toy(), Toy()
    for weight, weight_of_other in ((1, 5), (3, 2)):
        one.add(weight, weight)
        other.add(weight_of_other, weight_of_other)
    assert (one.finish().weight, other.finish().weight) == (4, 7)
    assert one.gradient == (1 + 9) / 4
    assert other.gradient == pytest.approx(29 / 7)


def test_given_backward_equals_the_own_one() -> None:
    """Accelerate's too, if it does not divide: see accelerate#3533 below."""
    of_accelerate = Accelerator(cpu=True).backward
    for backward in (None, Tensor.backward, of_accelerate):
        toy = Toy()
        for weight in (2, 3):
            loss = toy.parameter * weight
            toy.accumulator.backward(loss, weight=weight, backward=backward)
        toy.finish()
        assert toy.gradient == (4 + 9) / 5


@pytest.mark.parametrize(
    "backward", [partial(Tensor.backward, retain_graph=True), fails]
)
def test_weighting_is_taken_off_after_the_backward_pass(backward: Any) -> None:
    """A second pass is the user's own."""
    toy = Toy()
    loss = toy.parameter * 2
    try:
        toy.accumulator.backward(loss, 3, backward=backward)
    except RuntimeError:
        toy.accumulator.drop()
    toy.parameter.grad = None
    loss.backward()
    assert toy.gradient == 2


def test_parameters_that_the_first_micro_batches_do_not_use_equal_the_law() -> None:
    """One of two heads, say; nothing has been zeroed. The module is not known, so that
    a window shows only a part of the parameters."""
    toy, head = Toy(), nn.Parameter(torch.ones((), dtype=torch.float64))
    for _ in range(2):
        toy.parameter.grad = head.grad = None
        toy.add(2, 3)
        toy.add(4 * head, 1)
        toy.accumulator.finish([head])
        assert float(head.grad) == 1  # type: ignore[arg-type]


# ---- a gradient scaler ---------------------------------------------------------------


def test_scaler_that_is_none_is_refused() -> None:
    with pytest.raises(TrainkitError, match="scaler: must be a torch.*, received 3"):
        Toy(scaler=3)


def test_open_window_keeps_the_scalers_factor() -> None:
    """Half precision would lose gradients without it."""
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    toy = Toy(scaler=scaler)
    for _ in range(2):
        toy.parameter.grad = None
        for _ in range(2):
            toy.add(3, 5, backward=lambda loss: scaler.scale(loss).backward())
        assert 2.0**8 < toy.gradient < 2.0**20
        toy.finish()
        assert toy.gradient == 3 * 2.0**16


# ---- what is refused -----------------------------------------------------------------


def tear(toy: Toy) -> None:
    with pytest.raises(RuntimeError, match="out of memory"):
        toy.add(2, 3, backward=fails)


def go_own_way(toy: Toy, number: int) -> None:
    """A backward pass that starts from the loss so often."""

    def backward(loss: Tensor) -> None:
        for _ in range(number):
            loss.backward(retain_graph=True)

    toy.add(2, 3, backward=backward)
    toy.finish()


def divide(toy: Toy) -> None:
    """accelerate#3533: the trainer divides and the loss is divided too."""
    divides = Accelerator(cpu=True, gradient_accumulation_steps=4)
    try:
        toy.add(2, 3, backward=divides.backward)
    finally:
        divides.gradient_accumulation_steps = 1  # which all of its objects share


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (lambda toy: toy.finish(), r"finish\(\): the window is empty"),
        (lambda toy: (tear(toy), toy.add(2, 3)), r"in it has failed.*Call drop\(\)"),
        (lambda toy: (tear(toy), toy.finish()), r"in it has failed.*Call drop\(\)"),
        (lambda toy: go_own_way(toy, 0), "1 losses were weighted, and 0 backward"),
        (lambda toy: go_own_way(toy, 2), "1 losses were weighted, and 2 backward"),
        (divide, "accelerator.backward: .*steps=4.*gradient_accumulation_steps=1"),
        (
            lambda toy: toy.accumulator.backward(toy.parameter.expand(2), 1),
            r"one element, received \[2\].*='mean'",
        ),
        (lambda toy: toy.accumulator.backward(3.0, 1), "element, received 3.0"),
        (lambda toy: toy.accumulator.backward(None, 1), "element, received None"),
        (
            lambda toy: toy.accumulator.backward(toy.parameter.detach() * 1, 1),
            "must depend on parameters.*no_grad",
        ),
    ],
)
def test_what_breaks_a_window_is_refused_until_dropped(wrong: Any, text: str) -> None:
    toy = Toy()
    for _ in range(2):
        with pytest.raises(TrainkitError, match=text):
            wrong(toy)
        toy.accumulator.drop()
        toy.window((2, 3), (4, 1))
        assert toy.gradient == 2.5


@pytest.mark.parametrize("trains", [True, False])
def test_parameters_frozen_or_unfrozen_inside_are_refused(trains: bool) -> None:
    """Their gradient would be that of a part of the window; between two it may be."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    accumulator = Accumulator(PerSample())

    def window(*trains: bool) -> None:
        net.zero_grad()
        for each in trains:
            net[0].requires_grad_(each)
            accumulator.backward(net(ROWS).square().mean(), ROWS)
        accumulator.finish(net.parameters())

    window(trains)  # which shows the parameters
    window(not trains, not trains)
    with pytest.raises(TrainkitError, match="requires_grad: it has changed for 2 "):
        window(not trains, trains)


# ---- what the host waits for ---------------------------------------------------------

READERS = ["item", "tolist", "__bool__", "__int__", "__float__", "__index__", "numpy"]
WAITING = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal"}
WAITING |= {"aten::is_nonzero"}


class Waits(TorchDispatchMode):
    """Notes each operation whose result the host must wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func.name().split(".")[0]
        by_mask = name == "aten::index" and any(
            i is not None and i.dtype == torch.bool for i in args[1]
        )
        if name in WAITING or by_mask:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Waits:
    """On a CPU, whose tensors are left alone as those on a GPU are."""
    read_nothing(monkeypatch)
    waits = Waits()
    for name in READERS:
        original = getattr(Tensor, name)

        def noted(
            self: Tensor, *args: Any, _of: Any = original, _name: str = name
        ) -> Any:
            waits.found.append(_name)
            return _of(self, *args)

        monkeypatch.setattr(Tensor, name, noted)
    return waits


def run(waits: Waits, accumulator: Accumulator, loss: Any = token_loss) -> NoiseMoments:
    """Six windows, of which the noise is measured too."""
    net, parts = fresh_net(torch.float32), cut(ragged_sequences(12), (1, 4, 7))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    moments = NoiseMoments(accumulator, optimizer)
    waits.found.clear()
    with waits:
        for window in range(6):
            if window:
                moments.watch()
            run_open(accumulator, net, parts, loss)
            stats = accumulator.finish(optimizer)
            if window:
                moments.add(stats, samples=12)
            optimizer.step()
            optimizer.zero_grad()
    return moments


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("case", ["tokens", "samples", "class weights"])
def test_step_waits_for_nothing(
    case: str, reduction: Any, waits: Waits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchtitan#4099: no `.item()` on the path of a step. The flags are read when
    they have arrived, as a reading on a GPU is."""
    make, loss, _ = CASES[case]
    accumulator = Accumulator(make(loss_reduction=reduction))
    monkeypatch.setattr(accumulator.watch, "read_arrived", lambda: None)
    moments = run(waits, accumulator, loss)
    assert waits.found == []
    assert moments.estimate() is not None


def test_late_reading_is_one_copy_for_each_window(waits: Waits) -> None:
    run(waits, Accumulator(PerToken()))
    assert waits.found == ["tolist"] * 5  # the last one is still waiting


def test_counting_waits_finds_one(waits: Waits) -> None:
    """The control."""
    with waits:
        torch.ones(()).item()
        bool(torch.ones(()))
        torch.ones(3)[torch.ones(3) > 0]
    assert {"item", "__bool__", "aten::index"} <= set(waits.found)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_steps_on_a_gpu_wait_for_nothing() -> None:
    """torchtitan#4099: no micro-batch and no step makes the host wait."""
    parameter = nn.Parameter(torch.ones(1000, device="cuda"))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    accumulator = Accumulator(GivenWeight())
    weight = torch.tensor(3, device="cuda")

    def window(weight: Any) -> None:
        optimizer.zero_grad()
        accumulator.backward(parameter.mean(), weight)
        accumulator.backward(2 * parameter.mean(), 5)
        accumulator.finish(optimizer)
        optimizer.step()

    window(weight)
    with waiting_is_an_error():
        for _ in range(5):
            window(weight)
    window(torch.tensor(-1.0, device="cuda"))
    with pytest.raises(TrainkitError, match="optimizer step 6 "):
        accumulator.check()
