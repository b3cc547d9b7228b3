"""What must stop a run: read one window late, or before the step. Gradients that are
zeroed inside a window are gone: refused, whoever does it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.core.common import (
    IGNORED,
    Toy,
    big_batch,
    cut,
    fresh_net,
    joined,
    read_nothing,
    relative,
    run_window,
    token_losses,
)
from tests.core.conftest import OnRanks
from tests.helpers import TOLERANCE, TokenNet, gradients, ragged_sequences
from trainkit import Accumulator, PerSample, PerToken, TrainkitError
from trainkit.core import checks as module_of_checks
from trainkit.core.checks import LateReading

PARTS = cut(ragged_sequences(6), (2, 4))
WHOLE, WHOLE_LOSS = big_batch(fresh_net(), joined(PARTS))
NAN, INF = float("nan"), float("inf")

# ---- nothing to count ----------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_ignored_micro_batch_equals_its_absence(reduction: Any, place: int) -> None:
    """Composer, torchtune#1875: a mean over nothing is NaN, and NaN * 0 is NaN."""
    net, parts = fresh_net(), [*PARTS]
    parts.insert(place, IGNORED)
    accumulator = Accumulator(PerToken(loss_reduction=reduction), checks="now")
    stats = run_window(net, parts, accumulator)
    assert relative(gradients(net), WHOLE) <= 1e-12
    torch.testing.assert_close(stats.loss, WHOLE_LOSS, rtol=1e-12, atol=0)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_ignored_window_has_a_zero_gradient_said_once(reduction: Any) -> None:
    """Automodel#3797: zeros, not None and not NaN, and a word about it. The shared
    scale keeps its last value where there is none to take."""
    net = fresh_net()
    accumulator = Accumulator(PerToken(loss_reduction=reduction), checks="now")
    text = "optimizer step 0 .*none of the window's 2 micro-batches.*Said once"
    with pytest.warns(UserWarning, match=text):
        stats = run_window(net, [IGNORED, IGNORED], accumulator)
    assert all(p.grad is not None and not p.grad.any() for p in net.parameters())
    assert float(stats.loss) == float(stats.weight) == 0
    for parts in ([IGNORED], PARTS, [IGNORED], [PARTS[0], IGNORED, PARTS[1]]):
        net.zero_grad()
        run_window(net, parts, accumulator)  # a second warning would be an error
        if len(parts) > 1:
            assert relative(gradients(net), WHOLE) <= 1e-12


def test_total_that_weighs_nothing_keeps_its_gradient() -> None:
    """Nothing is divided, so there is no 0 / 0, and nothing to warn of."""
    toy = Toy(reduction="total", checks="now")
    assert float(toy.window((3, 0), (4, 0)).loss) == toy.gradient == 7


def own_mean(net: nn.Module, batch: Any, reduction: str) -> Tensor:
    """A loss that divides by its own count: 0/0 where nothing counts."""
    counts, labels = batch["labels"] != -100, batch["labels"].clamp(min=0)
    picked = net(batch["ids"]).log_softmax(-1).gather(-1, labels.unsqueeze(-1))
    total = -(picked.squeeze(-1) * counts).sum()
    return total / counts.sum() if reduction == "mean" else total


@pytest.mark.parametrize("where", ["before the step", "the next window", "the end"])
def test_own_mean_over_nothing_is_found_with_what_to_do(where: str) -> None:
    """llama-cookbook#133. Its gradient is NaN, which no weight can undo."""
    net = fresh_net()
    checks: Any = "now" if where == "before the step" else "late"
    accumulator = Accumulator(PerToken(), checks=checks)
    steps = torch.optim.SGD(net.parameters(), lr=0.1)

    def run() -> None:
        run_window(net, [IGNORED, *PARTS], accumulator, own_mean)
        steps.step()
        if where == "the next window":
            run_window(net, PARTS, accumulator, own_mean)
        accumulator.check()

    with pytest.raises(TrainkitError, match=r"clamp\(min=1\).*loss_reduction='sum'"):
        run()
    assert accumulator.num_windows == 1 + (where == "the next window")


# ---- weights and losses that cannot be -----------------------------------------------

IMPOSSIBLE = [-1, -0.5, NAN, INF]
LOSS_MUST = "the loss must be finite .* {} step was taken with it"


@pytest.mark.parametrize("is_read", [True, False])
@pytest.mark.parametrize("checks", ["late", "now"])
@pytest.mark.parametrize(
    ("bad", "text"),
    [
        *(((1, torch.tensor(w)), "finite and not negative") for w in IMPOSSIBLE),
        *(((loss, 1), LOSS_MUST) for loss in (NAN, INF, -INF)),
    ],
    ids=str,
)
def test_what_must_stop_the_run_is_read_a_window_late_or_before_the_step(
    bad: Any, text: str, checks: Any, is_read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether or not tensors are in the host's memory."""
    if not is_read:
        read_nothing(monkeypatch)
    toy = Toy(checks=checks)
    toy.window((1, 1))
    if checks == "late":
        toy.window((1, 5), bad, (1, 2))
        bad = (1, 1)
    where = r"optimizer step 1 \(counted from 0\), rank 0: "
    text = text.format("No" if checks == "now" else "The")
    with pytest.raises(TrainkitError, match=f"{where}.*{text}"):
        toy.window((1, 5), bad, (1, 2))
    assert toy.accumulator.num_windows == 2 + (checks == "late")


@pytest.mark.parametrize(
    ("weight", "text"),
    [
        *((weight, "finite and not negative, received") for weight in IMPOSSIBLE),
        (torch.ones(2), r"one number for a micro-batch, received .* \[2\]"),
        ("3", "a number or a 0-d tensor, received str"),
        (None, "a number or a 0-d tensor, received NoneType"),
    ],
)
def test_weight_that_cannot_be_is_refused_at_once(weight: Any, text: str) -> None:
    with pytest.raises(TrainkitError, match=text):
        Toy().window((1, weight))


def test_nonfinite_loss_is_left_to_a_scaler() -> None:
    """Beside a micro-batch of weight 0 too, whose gradient may be NaN."""
    toy = Toy(checks="now", scaler=torch.amp.GradScaler("cpu"))
    assert not toy.window((1, 1), (INF, 1)).loss.isfinite()
    toy.window((1, 1), (NAN, 0))
    assert toy.window((3, 2)).loss == 3


def test_unknown_check_is_refused() -> None:
    with pytest.raises(TrainkitError, match=r"checks: must be one of .*'never'"):
        Toy(checks="never")


# ---- readings that are on their way --------------------------------------------------


class OnItsWay(LateReading):
    """A reading as on a GPU, from a CPU tensor: it arrives when the test says so."""

    arrivals = False

    def __init__(self, tensor: Tensor) -> None:
        self._host, self._event = tensor, self

    def query(self) -> bool:
        return OnItsWay.arrivals

    def synchronize(self) -> None:
        OnItsWay.arrivals = True


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OnItsWay, "arrivals", False)
    monkeypatch.setattr(module_of_checks, "LateReading", OnItsWay)


def test_cpu_tensor_has_arrived() -> None:
    reading = LateReading(torch.tensor([1.0, 2.0]))
    assert reading.arrived
    assert reading.values() == [1.0, 2.0]


def test_window_that_has_not_arrived_is_not_waited_for(late: None) -> None:
    toy = Toy()
    for loss in (NAN, 1, 1):
        toy.window((loss, 1))
    assert not OnItsWay.arrivals
    OnItsWay.arrivals = True
    with pytest.raises(TrainkitError, match="optimizer step 0 "):
        toy.window((1, 1))


@pytest.mark.parametrize("checks", ["late", "now"])
def test_reading_all_or_reading_now_waits_for_the_last(checks: Any, late: None) -> None:
    toy = Toy(checks=checks)
    toy.window((1, 1))
    with pytest.raises(TrainkitError, match="optimizer step 1 "):
        _ = toy.window((NAN, 1)), toy.accumulator.check()
    assert OnItsWay.arrivals


def test_windows_before_a_loaded_state_are_forgotten() -> None:
    toy = Toy()
    state = toy.accumulator.state_dict()
    toy.window((NAN, 1))
    toy.accumulator.load_state_dict(state)
    toy.accumulator.check()
    assert toy.accumulator.num_windows == 0


def test_impossible_weight_in_a_loaded_state_is_found() -> None:
    toy = Toy(checks="now")
    toy.add(1, torch.tensor(-1))
    state = toy.accumulator.state_dict()
    toy.accumulator.load_state_dict(state)
    with pytest.raises(TrainkitError, match="finite and not negative"):
        toy.window((1, 5))


# ---- gradients that are zeroed -------------------------------------------------------

EXACT = TOLERANCE[torch.float64]
THREES = cut(ragged_sequences(9), (3, 3, 3))
BIG_BATCH, _ = big_batch(fresh_net(), joined(THREES))
GONE = r"the gradients of the \d micro-batches in it are gone"


def loss_of(net: nn.Module, batch: Any) -> torch.Tensor:
    """The mean over tokens; 0 if nothing counts."""
    return token_losses(net, batch).sum() / (batch["labels"] != -100).sum().clamp(1)


def run(
    between: Callable[[Any, Any], Any],
    *,
    after: int | None = None,
    windows: int = 1,
    told: int = False,
    shown: int = False,
    parts: Any = THREES,
) -> TokenNet:
    """Windows in whose last one something is done after a pass, or after each."""
    net = fresh_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    accumulator = Accumulator(PerToken(), module=net if shown else None)
    for window in range(windows):
        optimizer.zero_grad()
        if told:
            accumulator.expect(parts)
        for number, part in enumerate(parts, 1):
            accumulator.backward(loss_of(net, part), part)
            if after in (number, None) and window + 1 == windows:
                between(net, optimizer)
        accumulator.finish(optimizer)
    return net


ZEROINGS: dict[str, Callable[[Any, Any], Any]] = {
    "optimizer": lambda net, optimizer: optimizer.zero_grad(),
    "optimizer, in place": lambda net, opt: opt.zero_grad(set_to_none=False),
    "module": lambda net, optimizer: net.zero_grad(),
    "module, in place": lambda net, _: net.zero_grad(set_to_none=False),
    "by hand": lambda net, _: [p.grad.zero_() for p in net.parameters()],
    "replaced": lambda net, _: [
        setattr(p, "grad", torch.zeros_like(p)) for p in net.parameters()
    ],
}
TURNS = cycle([(1, 1, 0), (2, 0, 0), (2, 1, 0), (2, 0, 1), (1, 1, 1)])
"""How many windows, whether the module is shown, and whether they are announced."""


# Each zeroing at each place; the other values take turns.
PLACES = [(zeroing, after, next(TURNS)) for zeroing in ZEROINGS for after in (1, 2, 3)]


@pytest.mark.parametrize(("zeroing", "after", "how"), PLACES, ids=str)
def test_zeroing_inside_a_window_is_refused(zeroing: str, after: int, how: Any) -> None:
    """Also in the first window, if the module is shown, and after the last
    micro-batch."""
    windows, shown, told = how
    with pytest.raises(TrainkitError, match=GONE):
        run(ZEROINGS[zeroing], after=after, windows=windows, shown=shown, told=told)


def zeroed_over_ddp(rank: int, world_size: int) -> str:
    ddp = DDP(fresh_net())
    accumulator = Accumulator(PerToken(), module=ddp)
    with ddp.no_sync():
        accumulator.backward(loss_of(ddp, THREES[0]), THREES[0])
    ddp.zero_grad(set_to_none=False)
    with pytest.raises(TrainkitError) as error:
        accumulator.backward(loss_of(ddp, THREES[1]), THREES[1])
    return str(error.value)


def test_zeroing_under_ddp_is_refused(on_ranks: OnRanks) -> None:
    for text in on_ranks(zeroed_over_ddp, 2):
        assert "the gradients of the 1 micro-batches in it are gone" in text


def mended(net: Any, optimizer: Any) -> None:
    for p in net.parameters():
        p.grad.nan_to_num_()


def clipped(net: Any, optimizer: Any) -> None:
    nn.utils.clip_grad_norm_(net.parameters(), 1e9)


def masked(net: Any, optimizer: Any) -> None:
    net.embed.weight.grad[0] = 0


@pytest.mark.parametrize(
    ("between", "how"),
    [
        (lambda *_: None, {"windows": 3}),  # between two windows, zeroing is as ever
        (mended, {"after": 1}),
        (clipped, {}),
        (clipped, {"parts": [IGNORED, *THREES]}),  # zero, and was zero before
        (masked, {"after": 3}),
    ],
)
def test_gradients_written_into_equal_the_big_batch(between: Any, how: Any) -> None:
    """Whatever is written into gradients is no zeroing, and a warning is an error."""
    net, expected = run(between, **how), fresh_net()
    loss_of(expected, joined(THREES)).backward()
    if between is masked:
        masked(expected, None)
    assert relative(gradients(net), gradients(expected)) <= EXACT


def test_zeroing_after_a_beginning_without_weight_is_refused() -> None:
    with pytest.raises(TrainkitError, match=GONE):
        run(ZEROINGS["module, in place"], parts=[IGNORED, *THREES], shown=True)


@pytest.mark.parametrize("zeroes", [False, True])
def test_a_part_without_a_gradient_as_in_lora_is_no_zeroing(zeroes: bool) -> None:
    """B begins as zeros, so A's gradient is 0 in the first window."""
    torch.manual_seed(0)
    down, up = nn.Linear(4, 2), nn.Linear(2, 3)
    nn.init.zeros_(up.weight)
    nn.init.ones_(up.bias)
    lora = nn.Sequential(down, up).double()
    accumulator = Accumulator(PerSample(), module=lora)
    rows = torch.randn(5, 4).double()
    gone = pytest.raises(TrainkitError, match=GONE)
    with gone if zeroes else contextlib.nullcontext():
        for part in rows.split(2):
            accumulator.backward(lora(part).square().mean(), part)
            lora.zero_grad() if zeroes else clipped(lora, None)
        accumulator.finish(lora.parameters())
        found = gradients(lora)
        lora.zero_grad()
        lora(rows).square().mean().backward()
        assert relative(found, gradients(lora)) <= EXACT


def test_gradients_of_zeros_are_read_where_somebody_wrote() -> None:
    toy = Toy()
    toy.window((0, 2), (0, 2))
    toy.parameter.grad = None
    toy.add(0, 2)
    toy.parameter.grad.add_(0)  # type: ignore[union-attr]
    with pytest.raises(TrainkitError, match=GONE):
        toy.add(0, 2)
