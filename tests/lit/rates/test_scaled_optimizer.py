"""An optimizer at scaled numbers, whose schedulers and checkpoints know the user's."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam, AdamW
from torch.optim import lr_scheduler as lrs

from tests.lit.rates.scaled import (
    ABSOLUTE,
    EXACT,
    MAKERS,
    TORCH_SAYS,
    Curve,
    cube_root,
    cyclic,
    deviation,
    parameter,
    tensor_rate,
    times,
)
from trainkit.errors import TrainkitError
from trainkit.lit.rates.scaled_optimizer import ScaledOptimizer

pytestmark = TORCH_SAYS
K, STEPS = 4, 16


def scaled(optimizer: Any, k: float = K, *, rule: Any = "linear", **how: Any) -> Any:
    made = ScaledOptimizer(optimizer, rule=rule, **how)
    made.follow(k)
    return made


def stand_in(made: ScaledOptimizer, scheduler: Any) -> Any:
    made.adopt([config := SimpleNamespace(scheduler=scheduler)])
    return config.scheduler


def saved(made: ScaledOptimizer) -> dict[str, Any]:
    """What a checkpoint holds of an optimizer."""
    made.unscale(state := made.optimizer.state_dict())
    return state


# ---- curves --------------------------------------------------------------------------


def scaled_curve(name: str, first: Any, ks: Mapping[int, float], rule: Any) -> Any:
    """The curve at k from these steps on, and one in a new process before step 11."""
    curve, found, k = Curve(name, first), [], 1.0
    made = scaled(curve.optimizer, rule=rule)
    curve.scheduler = stand_in(made, curve.scheduler)
    for step in range(STEPS):
        if step == 11:
            curve = curve.resumed(saved(made))
            made = scaled(curve.optimizer, k, rule=rule)
            curve.scheduler = stand_in(made, curve.scheduler)
        k = ks.get(step, k)
        made.follow(k)
        found += curve.go(1)
    return found


@pytest.mark.parametrize("first", [(0.1,), (0.05, 0.2), (tensor_rate(0.1),) * 2])
@pytest.mark.parametrize("name", MAKERS)
def test_curve_of_every_scheduler_is_factor_times_plain(name: str, first: Any) -> None:
    """In the groups, of which two may share a tensor, and in `get_last_lr()`; over
    changes of k, and resumed."""
    ks = {0: 4.0, 4: 0.125, 8: 3.0}
    plain = Curve(name, copy.deepcopy(first)).go(STEPS)
    factors = [cube_root(ks[max(at for at in ks if at <= s)]) for s in range(STEPS)]
    found = scaled_curve(name, first, ks, cube_root)
    assert deviation(found, times(plain, factors)) <= EXACT


@pytest.mark.parametrize("name", ABSOLUTE)
def test_scaling_the_groups_alone_draws_another_curve(name: str) -> None:
    """What people do by hand; these schedulers hold rates of their own."""
    by_hand = Curve(name)
    for group in by_hand.optimizer.param_groups:
        group["lr"] *= 8
    found, plain = ([row[:2] for row in c.go(STEPS)] for c in (by_hand, Curve(name)))
    assert deviation(found, times(plain, [8] * STEPS)) > 0.05


class Warm(lrs.LRScheduler):
    """Keeps a rate where nobody looks for it."""

    def __init__(self, optimizer: Any) -> None:
        self.warmup = lambda step: 0.01 * step
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        warm = self.last_epoch < 3
        return [self.warmup(self.last_epoch) if warm else r for r in self.base_lrs]


class Other:
    """No scheduler of torch's, with a method of its own name, as timm's have."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.seen = optimizer, 0

    def step(self) -> None: ...

    def step_update(self) -> None:
        self.seen += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 0.5 / self.seen


@pytest.mark.parametrize(("kind", "method"), [(Warm, "step"), (Other, "step_update")])
def test_curve_of_a_foreign_scheduler_equals_factor_times_the_plain_one(
    kind: Any, method: str
) -> None:
    def walked(k: float | None) -> list[float]:
        optimizer, found = SGD([parameter()], lr=0.5), []
        scheduler: Any = kind(optimizer)
        if k is not None:
            scheduler = stand_in(scaled(optimizer, k), scheduler)
        for _ in range(5):
            optimizer.step()
            getattr(scheduler, method)()
            found.append(optimizer.param_groups[0]["lr"])
        return found

    assert len(set(walked(None))) > 2
    assert walked(K) == [K * rate for rate in walked(None)]


@pytest.mark.parametrize("make", [float, tensor_rate])
def test_rate_that_somebody_sets_holds_until_it_is_changed(make: Any) -> None:
    """It counts as scaled; a scheduler that goes on from it does so."""
    optimizer = AdamW([parameter()], lr=make(0.1))
    made = scaled(optimizer)
    scheduler = stand_in(made, lrs.ExponentialLR(optimizer, 0.5))
    (group,) = optimizer.param_groups
    if make is float:
        group["lr"] = 0.3
    else:
        group["lr"].fill_(0.3)
    made.follow(2 * K)
    assert float(group["lr"]) == pytest.approx(0.6)
    assert float(saved(made)["param_groups"][0]["lr"]) == pytest.approx(0.075)
    scheduler.step()
    assert float(group["lr"]) == pytest.approx(0.3)


def test_the_stand_in_is_the_scheduler_in_all_else() -> None:
    optimizer = SGD([parameter()], lr=0.1)
    scheduler = lrs.ReduceLROnPlateau(optimizer, patience=3)
    found = stand_in(made := scaled(optimizer), scheduler)
    assert found is not scheduler
    assert isinstance(found, lrs.ReduceLROnPlateau)
    found.patience = 0
    assert (found.patience, scheduler.patience) == (0, 0)
    assert found.state_dict() == scheduler.state_dict()
    assert copy.deepcopy(found).patience == 0
    assert stand_in(made, found) is found
    with pytest.raises(TypeError, match="float"):
        found.step(object())  # type: ignore[arg-type]
    assert optimizer.param_groups[0]["lr"] == 0.4  # scaled again after an error


# ---- the other numbers ---------------------------------------------------------------

MADE: dict[str, Callable[..., Any]] = {
    "Adam": partial(Adam, betas=(0.9, 0.99), eps=1e-4),
    "AdamW": partial(AdamW, betas=(0.99, 0.999), eps=1e-4, amsgrad=True),
    "NAdam": partial(torch.optim.NAdam, betas=(0.95, 0.99)),
    "RAdam": partial(torch.optim.RAdam, betas=(0.95, 0.999)),
    "Adamax": partial(torch.optim.Adamax, betas=(0.95, 0.99)),
    "RMSprop": partial(torch.optim.RMSprop, alpha=0.97, momentum=0.9),
}


FACTORS: dict[Any, float] = {
    **{"adam-sde": 2.0, "half-life": 1.0, "linear": 4.0, "sqrt": 2.0, "none": 1.0},
    math.sqrt: 2.0,
}


def flat(group: dict[str, Any]) -> dict[str, Any]:
    """Its numbers, with a name for each beta."""
    betas = {f"beta{i}": beta for i, beta in enumerate(group.get("betas", ()), 1)}
    others = {k: v for k, v in group.items() if k not in ("params", "betas")}
    return {**{k: v for k, v in others.items() if v is not None}, **betas}


def numbers(make: Any, rule: Any, **how: Any) -> tuple[Any, Any]:
    """A group's numbers before and after."""
    optimizer = make([parameter()], lr=0.1)
    before = flat(optimizer.param_groups[0])
    scaled(optimizer, rule=rule, **how)
    return before, flat(optimizer.param_groups[0])


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize(("rule", "factor"), FACTORS.items())
def test_rule_equals_its_formulas_alone(name: str, rule: Any, factor: float) -> None:
    """Such as NAdam's momentum_decay, RMSprop's momentum."""
    before, after = numbers(MADE[name], rule)
    expected = {**before, "lr": factor * before["lr"]}
    if rule == "adam-sde":
        expected["eps"] /= 2
        for key in {"beta1", "beta2", "alpha"} & set(before):
            expected[key] = 1 - K * (1 - before[key])
    if rule == "half-life":
        for key in {"beta2", "alpha"} & set(before):
            expected[key] = before[key] ** K
    assert after == pytest.approx(expected, rel=EXACT)


@pytest.mark.parametrize(
    ("rule", "decay", "factor"),
    [
        ("none", "none", 1.0),
        ("none", "linear", 4.0),
        ("sqrt", "sqrt", 2.0),
        ("sqrt", "time-scale", 2.0),
        ("none", "time-scale", 4.0),
        ("linear", "time-scale", 1.0),
        ("adam-sde", lambda k: 3 * k, 12.0),
        ("gain", "linear", 4.0),  # only time-scale takes the gain
        ("gain", "time-scale", 4 / math.sqrt((1 + 5 / 2) / (1 + 5 / 8))),
        # A callable need not be 1 at 1: what it returns is the factor.
        ("none", lambda k: 0.5, 0.5),
    ],
)
def test_weight_decay_equals_its_factor(rule: Any, decay: Any, factor: float) -> None:
    of_gain = {"noise_scale": 5.0, "reference_batch": 2.0} if rule == "gain" else {}
    before, after = numbers(AdamW, rule, weight_decay=decay, **of_gain)
    expected = factor * before["weight_decay"]
    assert after["weight_decay"] == pytest.approx(expected, rel=EXACT)


@pytest.mark.parametrize("decay", ["none", "linear", "time-scale"])
@pytest.mark.parametrize("rule", ["adam-sde", "half-life", "gain", "linear"])
def test_way_to_k_leaves_no_trace_and_checkpoints_hold_the_users_numbers(
    rule: Any, decay: Any
) -> None:
    """The gain is not a power of k: ratios of k would drift from window to window."""
    how: dict[str, Any] = {"rule": rule, "weight_decay": decay}
    if rule == "gain":
        how |= {"noise_scale": 5.0, "reference_batch": 2.0}

    def made(*ks: float) -> tuple[Any, Any]:
        optimizer = AdamW([parameter()], lr=tensor_rate(0.1), betas=(0.99, 0.999))
        found = scaled(optimizer, **how)
        for k in ks:
            found.follow(k)
        return flat(optimizer.param_groups[0]), saved(found)

    plain = AdamW([parameter()], lr=tensor_rate(0.1), betas=(0.99, 0.999)).state_dict()
    (found, state), (expected, _) = made(3, 0.5, 12), made(12)
    assert found == expected
    assert found["beta2"] != 0.999 or decay != "none" or found["lr"] != 0.1
    assert state == plain


def test_numbers_in_tensors_keep_their_address() -> None:
    """A compiled optimizer knows a tensor by it."""
    rate = tensor_rate(0.1)
    optimizer = AdamW([{"params": [parameter()], "lr": rate} for _ in range(2)])
    made = scaled(optimizer)
    scheduler = stand_in(made, MAKERS["ExponentialLR"](optimizer))
    optimizer.step()
    scheduler.step()
    assert all(group["lr"] is rate for group in optimizer.param_groups)
    assert float(rate) == pytest.approx(0.4 * 0.9)
    made.release()
    assert float(rate) == pytest.approx(0.09)
    assert optimizer.state_dict()["param_groups"][0]["lr"] is rate


@pytest.mark.parametrize(
    "make",
    [
        partial(cyclic, cycle_momentum=True, base_momentum=0.9, max_momentum=0.97),
        partial(lrs.OneCycleLR, max_lr=0.3, total_steps=21, base_momentum=0.9),
    ],
)
@pytest.mark.parametrize("kind", [Adam, SGD])
def test_cycled_beta1_has_its_formula_and_momentum_stays(kind: Any, make: Any) -> None:
    """Linear scaling holds the momentum (Goyal et al. 2017)."""
    key = "betas" if kind is Adam else "momentum"
    options: Any = {key: (0.95, 0.99) if kind is Adam else 0.9}

    def walked(rule: str | None) -> list[float]:
        optimizer = kind([parameter()], lr=0.1, **options)
        scheduler, found = make(optimizer), []
        if rule is not None:
            scheduler = stand_in(scaled(optimizer, rule=rule), scheduler)
        for _ in range(20):
            value = optimizer.param_groups[0][key]
            found.append(value[0] if kind is Adam else value)
            optimizer.step()
            scheduler.step()
        return found

    plain = walked(None)
    assert len({round(beta, 6) for beta in plain}) > 4
    found = walked("adam-sde" if kind is Adam else "linear")
    mapped = [1 - K * (1 - beta) if kind is Adam else beta for beta in plain]
    assert found == pytest.approx(mapped, abs=EXACT)


# ---- groups that come later ----------------------------------------------------------


@pytest.mark.parametrize(("rule", "factor"), [("adam-sde", 2.0), ("half-life", 1.0)])
def test_group_added_later_is_scaled_but_for_its_rate(rule: Any, factor: float) -> None:
    """Its rate may come from the rates in force. Later changes are for all alike."""
    optimizer = AdamW([parameter()], lr=0.1, betas=(0.99, 0.999))
    made = scaled(optimizer, rule=rule, weight_decay="linear")
    optimizer.add_param_group({"params": [parameter()], "lr": 0.3})
    made.adopt([])
    for rate in (0.3, 0.3 / factor):
        first, second = map(flat, optimizer.param_groups)
        assert second == pytest.approx({**first, "lr": rate}, rel=EXACT)
        made.follow(1.0)


# ---- refusals ------------------------------------------------------------------------


DECAYS: dict[str, Any] = {"rule": "none", "weight_decay": "time-scale"}
COUPLED = "adds weight decay to the gradient and"


def decaying(name: str, **how: Any) -> Any:
    return partial(getattr(torch.optim, name), weight_decay=0.1, **how)


def without_a_rate(parameters: Any, lr: float) -> SGD:
    optimizer = SGD(parameters, lr)
    optimizer.param_groups[0]["lr"] = None
    return optimizer


@pytest.mark.parametrize(
    ("make", "how", "text"),
    [
        (without_a_rate, {}, r"as its lr, received \[None\]"),
        (Adam, {"rule": "adam-sde", "k": 12}, "must stay above 0, and with k = 12 "),
        *(
            (getattr(torch.optim, name), {"rule": rule}, f"{name} has no betas")
            for name in ("SGD", "ASGD", "Adagrad", "Adadelta", "Rprop")
            for rule in ("adam-sde", "half-life")
        ),
        *((SGD, {"rule": lambda k, v=v: v}, "be a positive number") for v in (0, "2")),
        *((decaying(name), DECAYS, COUPLED) for name in ("Adam", "NAdam", "Adamax")),
        *((make, DECAYS, None) for make in (Adam, AdamW, decaying("SGD"))),
        (decaying("RAdam", decoupled_weight_decay=True), DECAYS, None),
    ],
)
def test_what_a_rule_cannot_do_is_refused(make: Any, how: Any, text: Any) -> None:
    """And then nothing has changed. Weight decay in the gradient has no time scale."""
    optimizer = make([parameter()], lr=0.1)
    before = flat(optimizer.param_groups[0])
    with nullcontext() if text is None else pytest.raises(TrainkitError, match=text):
        scaled(optimizer, **how)
    assert text is None or flat(optimizer.param_groups[0]) == before


def test_reach_goes_by_what_beta_is_for_the_reference_batch() -> None:
    """Scaled by 4 already, 0.9 stands at 0.6; 8 x 0.1 is still below 1. Of a cycle it
    is the lowest, which comes in mid-cycle."""
    optimizer = Adam([parameter()])
    made = scaled(optimizer, rule="adam-sde")
    for k in (4.0, 8.0, 9.5):
        made.follow(k)
        assert optimizer.param_groups[0]["betas"][0] == pytest.approx(1 - k * 0.1)
    for kind, ends in ((lrs.CyclicLR, (0.1, 1)), (lrs.OneCycleLR, (1, 30))):
        optimizer = AdamW([parameter()], betas=(0.99, 0.999))
        kind(optimizer, *ends, base_momentum=0.7, max_momentum=0.99)
        with pytest.raises(TrainkitError, match="k = 4 beta = 0.7 becomes -0.2:"):
            scaled(optimizer, rule="adam-sde")
