"""Half precision is the rounded big batch, and its scaler skips no more steps."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import (
    NAIVE,
    TOLERANCE,
    TokenNet,
    deviation,
    gradients,
    loader,
    ragged_sequences,
    token_loss,
    weights,
)
from tests.lit.fronts import (
    RAGGED,
    SEQUENCES,
    big_batch,
    fit,
    merged,
    micro_batches,
    windows_of,
)
from tests.lit.resume.resuming import Resumable, Saving
from tests.lit.windows.test_modules import Wrapper
from tests.lit.windows.test_windows import of, stepped, without
from tests.zoo.callbacks import Gradients, Weights
from tests.zoo.modules import Plain, hooked, scaled
from trainkit import AccumulationStrategy, MicroBatching, PerToken, TrainkitError

pytestmark = [
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step..` before"),
    pytest.mark.filterwarnings("ignore:`training_step` returned `None`:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*fused=True. under a gradient scaler"),
]
FLOAT: dict[str, Any] = {"dtype": torch.float32}
START = weights(Plain(**FLOAT))


@dataclass(frozen=True)
class Heavy(AccumulationStrategy):
    """Tokens that each weigh much: a micro-batch weighs 50,000 and more."""

    each: float = 5000.0

    def weight(self, batch: Any) -> Tensor:
        return PerToken().weight(batch) * self.each  # type: ignore[operator]


def precise(precision: str, **scaler: Any) -> dict[str, Any]:
    """Trainer options; `16-mixed` with a real gradient scaler, on the CPU."""
    if precision != "16-mixed":
        return {"precision": precision}
    return scaled(**{"init_scale": 2.0**16, **scaler})


def fit_scaled(front: str, kind: Any = Plain, *callbacks: Any, **how: Any) -> Any:
    """As `fit`, in a `precision`, by default `16-mixed` with an `init_scale`."""
    scale = how.pop("init_scale", 2.0**16)
    how |= precise(how.pop("precision", "16-mixed"), init_scale=scale)
    how["made"] = {**FLOAT, **how.get("made", {})}
    return fit(front, kind, *callbacks, **how)


# AdamW's eps of 1e-8 is 0 in float16, with or without trainkit.
@pytest.mark.parametrize(
    ("precision", "optimizer"),
    [
        *product(("bf16-mixed", "16-mixed"), ("sgd", "adamw")),
        *product(("bf16-true", "16-true"), ("momentum",)),
    ],
)
def test_half_precision_equals_big_batch(precision: str, optimizer: str) -> None:
    """Up to the rounding of its dtype, the same for weights of 1 and of 5,000; mixed
    precision that of float32, too."""

    def train(front: str, how: Any, **made: Any) -> Any:
        made |= {"optimizer": optimizer}
        return fit_scaled(front, precision=precision, made=made, **how).lightning_module

    big = train("plain", {"sizes": merged(RAGGED), "window": 1})
    naive = train("plain", {})
    tolerance = TOLERANCE[torch.bfloat16 if "bf16" in precision else torch.float16]
    if optimizer == "adamw":
        tolerance *= 3  # it takes the sign of what rounding leaves of small gradients
    for strategy in (PerToken(), Heavy()):
        module = train("callback", {}, strategy=strategy)
        off = deviation(module, big, START)
        assert off <= tolerance
        assert deviation(naive, big, START) > max(NAIVE, 3 * off)
        if "mixed" in precision:
            full = big_batch(SEQUENCES, optimizer=optimizer, **FLOAT).end
            assert deviation(module, full, START) <= tolerance


# ---- wide gradients: float32 beside bfloat16 parameters ------------------------------

MANY = ragged_sequences(64, longest=30)


def exact_gradient() -> Tensor:
    """Of the weights as bfloat16 has them, in float64, over one micro-batch a row."""
    net = TokenNet().bfloat16()
    total, count = torch.zeros_like(weights(net)), 0
    for batch in loader(MANY, 1):
        weight = int((batch["labels"] != -100).sum())
        net.zero_grad()
        token_loss(net, batch).backward()
        total += gradients(net) * weight
        count += weight
    return total / count


def by_trainer(front: str, wide: bool, cut: MicroBatching | None = None) -> Tensor:
    made = {"loss": token_loss, "options": {"wide_gradients": wide}, "cut": cut}
    how: dict[str, Any] = {"made": made, "precision": "bf16-true", "max_epochs": 1}
    size, how["window"] = (64, 1) if cut else (1, 64)
    how["batches"] = lambda sizes: loader(MANY, size)
    module = fit_scaled(front, Plain, seen := Gradients(), **how).lightning_module
    assert all(p.grad is None or p.grad.dtype == p.dtype for p in module.parameters())
    return seen.seen[0]


@pytest.mark.parametrize(
    ("front", "cut"), [("callback", None), ("mixin", MicroBatching(size=1))]
)
def test_window_of_64_loses_less_than_in_bfloat16(front: str, cut: Any) -> None:
    """What is left is one rounding, and that of each weighted micro-batch."""
    exact = exact_gradient()
    ends = [by_trainer(front, wide, cut) for wide in (True, False)]
    wide, own = (float((end - exact).norm() / exact.norm()) for end in ends)
    assert wide < 4e-3
    assert own > 1.5 * wide


def test_wide_gradients_that_cannot_be_are_refused() -> None:
    with pytest.raises(TrainkitError, match="wide_gradients=True: under a gradient"):
        fit_scaled("mixin", made={"options": {"wide_gradients": True}})


# ---- a scaler skips steps ------------------------------------------------------------

HALF = TOLERANCE[torch.float16]
OVERFLOWS = 2.0**28
"""A scaler's first factor that costs steps, also without trainkit; 2^16 costs none."""


def apart(one: Any, other: Any) -> float:
    """How far two Trainers' modules have ended from each other."""
    return deviation(one.lightning_module, other.lightning_module, START)


def fused(parameters: Any) -> torch.optim.Optimizer:
    """Takes the scaler's factor off inside its step."""
    return torch.optim.SGD(parameters, lr=0.5, fused=True)


@cache
def plainly(init_scale: float) -> Weights:
    """What plain Lightning comes to."""
    plain = Weights()
    fit_scaled("plain", Plain, plain, max_epochs=4, init_scale=init_scale)
    return plain


@pytest.mark.parametrize(
    ("front", "strategy", "init_scale", "optimizer"),
    [
        ("mixin", PerToken(), OVERFLOWS, "sgd"),
        ("callback", Heavy(), 2.0**16, "sgd"),
        ("callback", Heavy(1e8), OVERFLOWS, "sgd"),
        ("callback", PerToken(), OVERFLOWS, fused),
        ("mixin", PerToken(), OVERFLOWS, Wrapper),
    ],
)
def test_steps_lost_to_the_scaler_equal_those_of_plain_lightning(
    front: str, strategy: AccumulationStrategy, init_scale: float, optimizer: Any
) -> None:
    """keras#20878: Lightning's own counter goes on; ours tells which were skipped. They
    are counted afresh in each fit: the scaler has found its factor in the first one."""
    plain, ours = plainly(init_scale), Weights()
    made = {"strategy": strategy, "optimizer": optimizer}
    how: dict[str, Any] = {"max_epochs": 4, "init_scale": init_scale, "made": made}
    fitted = fit_scaled(front, Plain, ours, **how)
    windows = windows_of(fitted)
    assert fitted.global_step == 12
    assert windows.num_skipped_steps == 12 - ours.num_taken
    assert ours.num_taken >= plain.num_taken
    assert min(ours.scales) >= min(plain.scales)
    assert bool(windows.num_skipped_steps) == (init_scale > 2.0**16)
    assert not windows.skipped_last_step()
    fitted.fit_loop.max_epochs = 8
    fitted.fit(fitted.lightning_module, micro_batches(SEQUENCES))
    assert windows_of(fitted).num_skipped_steps == 0


@pytest.mark.parametrize(
    "sizes", [(1, 30, 30, 30), (60, *(1,) * 31)], ids=["light", "heavy"]
)
def test_no_step_is_lost_after_an_uneven_start(sizes: tuple[int, ...]) -> None:
    """A first micro-batch that weighs little; a short last window before a full one."""
    sequences = ragged_sequences(sum(sizes), longest=40)
    batches = micro_batches(sequences, sizes)
    window = len(sizes) - 1 if sizes[0] > 1 else len(sizes)
    how: dict[str, Any] = {"window": window, "max_epochs": 4}
    fitted = fit_scaled("mixin", batches=lambda _: batches, **how)
    assert windows_of(fitted).num_skipped_steps == 0
    assert fitted.precision_plugin.scaler.get_scale() == 2.0**16


def test_none_elsewhere_under_a_scaler_does_not_count() -> None:
    skipped = (0, 4, 5, 6, 7)
    module = fit_scaled("mixin", without(*skipped), max_epochs=1).lightning_module
    expected = stepped(of(4, [k for k in range(10) if k not in skipped]))
    assert deviation(module, expected, START) <= HALF


@pytest.mark.parametrize(
    ("kind", "lr", "init_scale"),
    [(torch.optim.AdamW, 0.05, OVERFLOWS), (torch.optim.SGD, 0.5, 2.0**16)],
)
def test_fused_optimizer_under_a_scaler_equals_unfused(
    kind: Any, lr: float, init_scale: float
) -> None:
    """pytorch-lightning#21435: gradients are still scaled at the hook; announced, and
    only then."""
    made, unfused = (
        {"optimizer": lambda parameters, how=how: kind(parameters, lr=lr, **how)}
        for how in ({"fused": True}, {})
    )
    how: dict[str, Any] = {"init_scale": init_scale, "max_epochs": 4}
    text = rf"{kind.__name__}\(fused=True\) under a grad"
    with pytest.warns(UserWarning, match=text):
        fitted = fit_scaled("mixin", made=made, **how)
    expected = fit_scaled("mixin", made=unfused, **how)
    skipped = windows_of(fitted).num_skipped_steps
    assert skipped == windows_of(expected).num_skipped_steps
    assert bool(skipped) == (init_scale > 2.0**16)
    assert apart(fitted, expected) <= 1e-5
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*fused=True")
        fitted = fit("mixin", made={**FLOAT, **made})
    expected = fit("mixin", made={**FLOAT, **unfused})
    assert apart(fitted, expected) <= 1e-5


@pytest.mark.parametrize("clip", ["norm", "value"])
def test_clipping_comes_after_unscaling(clip: str) -> None:
    """pytorch-lightning#9599, #9694, #18089: a clip at 0.1 is one at 0.1, not at
    0.1 / 65536. And the window's loss is without the scaler's factor, undivided."""
    how: dict[str, Any] = {"gradient_clip_val": 0.1, "gradient_clip_algorithm": clip}
    mixed, full = (fit_scaled("mixin", precision=p, **how) for p in ("16-mixed", "32"))
    assert apart(mixed, full) <= HALF
    once = windows_of(fit_scaled("mixin", max_epochs=1, max_steps=1)).last_window
    assert once is not None
    expected = big_batch(SEQUENCES, epochs=1, **FLOAT).losses[0]
    assert float(once.loss) == pytest.approx(expected, rel=1e-2)


RESUMABLE: dict[str, Any] = {"batches": lambda sizes: Resumable()}


@pytest.mark.parametrize("at", [1, 5])
def test_resumed_inside_a_scaled_window_equals_uninterrupted(
    tmp_path: Path, at: int
) -> None:
    """The partial gradients hold the scaler's factor, which is saved as well."""
    path = tmp_path / "inside.ckpt"
    saved = fit_scaled(
        "mixin", Plain, Saving(path, at), init_scale=OVERFLOWS, **RESUMABLE
    )
    again = fit_scaled("mixin", ckpt_path=path, **RESUMABLE)
    assert apart(again, saved) <= 1e-6


@pytest.mark.parametrize(
    ("saved_in", "resumed_in"),
    [("16-mixed", "bf16-mixed"), ("16-mixed", "32-true"), ("32-true", "16-mixed")],
)
def test_window_resumed_in_another_precision_keeps_its_scale(
    tmp_path: Path, saved_in: str, resumed_in: str
) -> None:
    """What was saved carries the scaler's factor, and the rest another or none."""
    path = tmp_path / "inside.ckpt"
    fit_scaled("mixin", Plain, Saving(path, 5), precision=saved_in, **RESUMABLE)
    found, reference = Gradients(), Gradients()
    how = {"precision": resumed_in, "ckpt_path": path, **RESUMABLE}
    fit_scaled("mixin", Plain, found, **how)
    fit_scaled("mixin", Plain, reference, precision="32-true", **RESUMABLE)
    norms = [[float(each.norm()) for each in seen.seen] for seen in (found, reference)]
    assert norms[0] == pytest.approx(norms[1][-len(norms[0]) :], rel=0.02)


MADE: dict[str, Any] = {**FLOAT, "scheduler": "step"}


class OfTheInstance(Plain):
    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        step: Any = lambda scheduler, metric: scheduler.step()  # noqa: E731
        self.lr_scheduler_step = step


KINDS: dict[str, Any] = {
    "none": Plain,
    "with super": hooked(
        Plain, lr_scheduler_step=lambda m, s, of: Plain.lr_scheduler_step(m, s, of)
    ),
    "of the instance": OfTheInstance,
}


@pytest.mark.parametrize(
    ("front", "kind", "hold", "made"),
    [
        *(("mixin", kind, hold, {}) for kind in KINDS for hold in (True, False)),
        ("callback", "none", True, {}),
        ("mixin", "none", True, {"optimizer": fused}),
        ("callback", "none", True, {"scheduler": "epoch"}),
    ],
)
def test_scheduler_is_held_back_only_if_asked(
    front: str, kind: str, hold: bool, made: Any
) -> None:
    """keras#20878, holocron#504: a skipped step moves Lightning's scheduler. One that
    moves by epoch is never held."""
    made = {**MADE, **made, "options": {"hold_schedulers": hold}}
    fitted = fit(front, KINDS[kind], made=made, max_epochs=4, **scaled(2.0**28))
    skipped = windows_of(fitted).num_skipped_steps
    assert 0 < skipped < fitted.global_step == 12
    moved = fitted.lr_scheduler_configs[0].scheduler.last_epoch
    by_step = 12 - (skipped if hold else 0)
    assert moved == (4 if made["scheduler"] == "epoch" else by_step)
