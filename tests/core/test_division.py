"""Windows that are announced: each loss is scaled exactly, and nothing is divided.
Narrow dtypes: no weight is rounded, nothing overflows, no step is lost."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from tests.core.common import (
    GivenWeight,
    Toy,
    big_batch,
    cut,
    fresh_net,
    joined,
    read_nothing,
    relative,
)
from tests.helpers import deviation, gradients, ragged_sequences, token_loss
from trainkit import Accumulator, PerToken, TrainkitError
from trainkit.core.division import UNKNOWN, power_of_two, weights_by_term

PARTS = cut(ragged_sequences(17), (5, 1, 8, 3))
WHOLE, LOSS = big_batch(fresh_net(), joined(PARTS))


@pytest.fixture(autouse=True, params=["in the host's memory", "on a device"])
def place(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where tensors are, as trainkit sees it: it reads those in the host's memory."""
    if request.param == "on a device":
        read_nothing(monkeypatch)
    return request.param


@pytest.mark.parametrize("scales", [False, True])
def test_gradients_are_exact_before_the_window_is_finished(scales: bool) -> None:
    """No second pass over them. The weights themselves can be announced too."""
    net = fresh_net()
    scaler = torch.amp.GradScaler("cpu", enabled=scales)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    accumulator = Accumulator(PerToken(), scaler=scaler)
    accumulator.tell(weights_by_term({"": PerToken()}, PARTS))
    for batch in PARTS:
        loss = token_loss(net, batch)
        accumulator.backward(loss, backward=lambda x: scaler.scale(x).backward())
    scaler.unscale_(optimizer)
    before = gradients(net)
    assert relative(before, WHOLE) <= (1e-6 if scales else 1e-12)  # it is in float32
    stats = accumulator.finish(optimizer)
    assert torch.equal(gradients(net), before)
    torch.testing.assert_close(stats.loss, LOSS)


@pytest.mark.filterwarnings("ignore:.*none of the window")
@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize(
    ("weights", "reduction", "gradient"),
    [
        ((3, 0, 5), "mean", 3 / 8 + 500 / 8),
        ((3, 0, 5), "sum", 111 / 8),
        ((3, 0, 5), "total", 111),
        ((0, 0, 0), "mean", 0),
        ((0, 0, 0), "sum", 0),
        ((0, 0, 0), "total", 111),
    ],
)
def test_factors_are_shares_of_the_total(
    weights: Any, reduction: Any, gradient: float, as_tensor: bool
) -> None:
    """Of losses of 1, 10 and 100, whose factors can be read from their sum."""
    toy = Toy(reduction=reduction)
    toy.accumulator.expect([torch.tensor(w) if as_tensor else w for w in weights])
    for loss in (1, 10, 100):
        toy.add(loss)
    assert toy.gradient == gradient
    toy.finish()
    assert toy.gradient == gradient


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_are_not_rounded_to_a_loss_in_half_precision(dtype: Any) -> None:
    """bfloat16(1001) is 1000: such a window is divided at its end, by what the losses
    were really multiplied by."""
    toy, weights = Toy(dtype=torch.float32), [1001, 1003, 7]
    toy.accumulator.expect(weights)
    for _ in weights:
        toy.accumulator.backward(toy.parameter.to(dtype) * 1)
    toy.finish()
    assert toy.gradient == pytest.approx(1, rel=1e-6)
    shares = torch.tensor(weights) / sum(weights)
    assert float(shares.to(dtype).double().sum()) != pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize("is_resumed", [False, True])
@pytest.mark.parametrize("kinds", ["nnn", "ttt", "ntt", "tnn"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_what_half_precision_has_rounded_is_not_rounded_again(
    dtype: Any, kinds: str, is_resumed: bool
) -> None:
    """Whether weights are numbers, tensors or some of each. A resumed run has a number
    as the unit of its sums. In float16 these weights are infinite, 1 / unit is 0."""
    weights, divided_by = (400_000_000, 400_030_000, 280_050_000), (1, 3, 2)
    toy = Toy(dtype=torch.float32)
    for kind, weight, by in zip(kinds, weights, divided_by, strict=True):
        if is_resumed and toy.accumulator.is_open:
            saved, gradient = toy.accumulator.state_dict(), toy.parameter.grad
            toy = Toy(dtype=torch.float32)
            toy.parameter.grad = gradient
            toy.accumulator.load_state_dict(saved)
        given = torch.tensor(weight) if kind == "t" else weight
        loss = (toy.parameter / by).to(dtype)
        toy.accumulator.weigh(loss, given, divided_by=by)
        loss.backward()
    assert float(toy.finish().weight) == sum(weights)
    assert toy.gradient == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize(
    ("announced", "num_run", "text"),
    [
        ([[1]], 2, "to have 1 micro-batches on this rank, and another one came"),
        ([[1, 1]], 1, "was to have 2 .* and had 1: its gradient"),
        ([[1, 1]], 0, "was to have 2 .* and had 0: its gradient"),
        ([[]], 0, r"expect\(\): received no micro-batches"),
        ([[1], [1]], 0, r"expect\(\): must announce a window before it begins"),
        ([None, [1]], 0, r"expect\(\): must announce a window before it begins"),
        *(([[w]], 1, "weight: must be") for w in (-1, torch.nan, torch.inf, "3", None)),
    ],
)
def test_another_window_is_refused(announced: Any, num_run: int, text: str) -> None:
    toy = Toy()

    def run() -> None:
        for weights in announced:
            if weights is None:  # a micro-batch, in its place
                toy.add(2, 1)
            else:
                toy.accumulator.expect(weights)
        for _ in range(num_run):
            toy.add(2)
        toy.finish()

    with pytest.raises(TrainkitError, match=text):
        run()
    toy.accumulator.drop()
    toy.parameter.grad = None
    toy.accumulator.expect([1, 3])
    toy.add(2)
    toy.add(6)
    assert toy.gradient == 5  # which leaves no trace


@pytest.mark.parametrize(
    ("number", "before", "expected"),
    [
        (20.0, None, 16.0),
        (1.5, None, 2.0),
        (0.3, None, 0.25),
        (-1.0, 16.0, 16.0),
        (8.0, 16.0, 8.0),
        (0.0, None, UNKNOWN),
        (float("nan"), None, UNKNOWN),
        (3.0, 16.0, 8.0),  # a short last window
        (90.0, 16.0, 64.0),
        (0.0, 16.0, 16.0),
    ],
)
def test_unit_of_the_sums_follows_the_windows(
    number: float, before: float | None, expected: float
) -> None:
    """By plain numbers, by tensors, and by one of each."""
    old = None if before is None else torch.tensor(before, dtype=torch.float64)
    new = torch.tensor(number, dtype=torch.float64)
    for pair in product((number, new), (before, old)):
        assert power_of_two(*pair) == expected


def test_one_process_divides_by_plain_numbers(place: str) -> None:
    """Each small operation on a GPU costs a launch; ranks and tensors there need
    them."""
    plain, tensors = Toy(), Toy()
    for loss, weight in ((5.0, 2), (7.0, 0), (1.0, 6)):
        plain.add(loss, weight)
        tensors.add(loss, torch.tensor(weight))
    assert type(plain.accumulator.division.reference) is float
    is_tensor = isinstance(tensors.accumulator.division.reference, torch.Tensor)
    assert is_tensor == (place == "on a device")
    plain.finish()
    tensors.finish()
    assert plain.gradient == tensors.gradient == 2.0
    plain.accumulator.load_state_dict(tensors.accumulator.state_dict())
    assert type(plain.accumulator.division.reference) is float
    plain.window((5.0, 0), (7.0, 0))
    with pytest.warns(UserWarning, match="none of the window"):
        plain.accumulator.check()
    assert plain.gradient == 0


# ---- narrow dtypes -------------------------------------------------------------------

NARROW_PARTS = cut(ragged_sequences(16, longest=30), (1, 5, 10))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("divided_by", [1, 3])
def test_weight_1001_of_a_half_loss_is_not_rounded(dtype: Any, divided_by: int) -> None:
    """bfloat16(1001) is 1000: what was applied is what the window divides by, so equal
    micro-batches keep their gradient."""
    toy = Toy(dtype=dtype)
    for _ in range(4):
        loss = toy.parameter * 1 / divided_by
        toy.accumulator.weigh(loss, 1001, divided_by=divided_by)
        loss.backward()
    assert float(toy.finish().weight) == 4004
    assert toy.gradient == 1


@pytest.mark.parametrize("checks", ["late", "now"])
def test_float16_sum_that_overflows_is_said(checks: Any) -> None:
    """The first window's r follows its first micro-batch, so that much heavier ones
    overflow, while every loss is finite."""
    toy = Toy(dtype=torch.float16, checks=checks)
    if checks == "late":
        toy.window((6, 1), (6, 60_000), (6, 50_000))
    last: Any = toy.accumulator.check if checks == "late" else toy.window
    given = [] if checks == "late" else [(6, 1), (6, 60_000), (6, 50_000)]
    with pytest.raises(TrainkitError, match=r"step 0 .*float16 is infinite or NaN"):
        last(*given)


def test_float16_sum_that_overflows_is_left_to_a_scaler() -> None:
    scaler = torch.amp.GradScaler("cpu")
    toy = Toy(dtype=torch.float16, checks="now", scaler=scaler)
    toy.window((6, 1), (6, 60_000_000))
    assert not toy.parameter.grad.isfinite()  # type: ignore[union-attr]


# ---- a gradient scaler ---------------------------------------------------------------


def test_a_scaler_that_is_off_lets_nothing_pass() -> None:
    toy = Toy(checks="now", scaler=torch.amp.GradScaler("cpu", enabled=False))
    with pytest.raises(TrainkitError, match="the loss must be finite"):
        toy.window((1, 1), (torch.inf, 1))


def scaled_training(
    way: str, *, scale: int = 1, unscale_first: bool = True, steps: int = 12
) -> tuple[float, int, nn.Module]:
    """A loop under autocast; the scale at its end, and how many steps were taken."""
    net = fresh_net(torch.float32)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13, growth_interval=1000)
    accumulator = Accumulator(GivenWeight(), scaler=scaler)
    taken = []
    optimizer.register_step_post_hook(lambda *_: taken.append(1))

    def backward(loss: torch.Tensor) -> None:
        scaler.scale(loss).backward()

    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            for batch in NARROW_PARTS if way != "whole" else [joined(NARROW_PARTS)]:
                loss = token_loss(net, batch)
                if way == "trainkit":
                    weight = PerToken().weight(batch) * scale
                    accumulator.backward(loss, weight=weight, backward=backward)
                else:
                    backward(loss * scale)
        if unscale_first:
            scaler.unscale_(optimizer)
        if way == "trainkit":
            accumulator.finish(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1e9)
        scaler.step(optimizer)
        scaler.update()
    return scaler.get_scale(), len(taken), net


@pytest.mark.parametrize("unscale_first", [True, False])
@pytest.mark.parametrize("scale", [1, 50_000])
def test_scaler_loses_no_step_to_large_weights(scale: int, unscale_first: bool) -> None:
    """pytorch-lightning#9599, super-gradients#653, holocron#504."""
    how: Any = {"unscale_first": unscale_first}
    kept, taken, net = scaled_training("trainkit", scale=scale, **how)
    whole_kept, whole_taken, whole = scaled_training("whole", **how)
    assert (kept, taken) == (whole_kept, whole_taken) == (2.0**13, 12)
    assert deviation(net, whole, fresh_net(torch.float32)) <= 1e-2


def test_scaler_without_the_shared_scale_loses_steps() -> None:
    """The control, r = 1: weights of 50,000 overflow and the scale collapses."""
    kept, taken, _ = scaled_training("r = 1", scale=50_000)
    assert taken < 12
    assert kept < 2.0**13


def test_first_window_leaves_headroom_under_a_scaler() -> None:
    """Its first micro-batch may be light: an overflow would cost a step."""
    toy = Toy(dtype=torch.float16, scaler=torch.amp.GradScaler("cpu"))
    toy.add(600, 1)
    toy.add(600, 250)
    assert toy.gradient < 2**11
    toy.finish()
    assert toy.gradient == 600
