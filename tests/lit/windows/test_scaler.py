"""Steps that a gradient scaler skips: no more than in plain Lightning, and counted."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import LambdaCallback

from tests.helpers import TOLERANCE, deviation, ragged_sequences, trainer, weights
from tests.lit.fronts import (
    RAGGED,
    SEQUENCES,
    WINDOW,
    big_batch,
    fit,
    micro_batches,
    ragged,
    windows_of,
)
from tests.lit.resume.resuming import Resumable, Saving
from tests.lit.windows.test_modules import Wrapper
from tests.lit.windows.test_precision import Heavy, precise
from tests.lit.windows.test_windows import of, stepped, without
from tests.zoo.callbacks import SENT, Gradients, Weights
from tests.zoo.modules import Mixed, Plain, hooked, scaled
from trainkit import AccumulationStrategy, PerToken

pytestmark = [
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step..` before"),
    pytest.mark.filterwarnings("ignore:`training_step` returned `None`:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*fused=True. under a gradient scaler"),
]
HALF = TOLERANCE[torch.float16]
OVERFLOWS = 2.0**28
"""A scaler's first factor that costs the first steps, with or without trainkit; 2^16
costs none."""
FLOAT: dict[str, Any] = {"dtype": torch.float32}
START = weights(Plain(**FLOAT))


def fit_scaled(
    front: str,
    kind: Callable[..., Any] = Plain,
    *callbacks: Any,
    precision: str = "16-mixed",
    init_scale: float = 2.0**16,
    made: Any = None,
    **how: Any,
) -> Any:
    """As `fit`, in half precision."""
    how |= precise(precision, init_scale=init_scale)
    return fit(front, kind, *callbacks, made={**FLOAT, **(made or {})}, **how)


def apart(one: Any, other: Any) -> float:
    """How far two Trainers' modules have ended from each other."""
    return deviation(one.lightning_module, other.lightning_module, START)


def fused(parameters: Any) -> torch.optim.Optimizer:
    """Takes the scaler's factor off inside its step."""
    return torch.optim.SGD(parameters, lr=0.5, fused=True)


def fused_adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05, fused=True)


# ---- how many steps are skipped ------------------------------------------------------


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
    how: dict[str, Any] = {"batches": lambda _: micro_batches(sequences, sizes)}
    window = len(sizes) - 1 if sizes[0] > 1 else len(sizes)
    fitted = fit_scaled("mixin", window=window, max_epochs=4, **how)
    assert windows_of(fitted).num_skipped_steps == 0
    assert fitted.precision_plugin.scaler.get_scale() == 2.0**16


# ---- what the steps are --------------------------------------------------------------


def test_none_elsewhere_under_a_scaler_does_not_count() -> None:
    skipped = (0, 4, 5, 6, 7)
    module = fit_scaled("mixin", without(*skipped), max_epochs=1).lightning_module
    expected = stepped(of(4, [k for k in range(10) if k not in skipped]))
    assert deviation(module, expected, START) <= HALF


@pytest.mark.parametrize(
    ("make", "init_scale"), [(fused_adam, OVERFLOWS), (fused, 2.0**16)]
)
def test_fused_optimizer_under_a_scaler_equals_unfused(
    make: Any, init_scale: float
) -> None:
    """pytorch-lightning#21435: gradients are still scaled at the hook; announced, and
    only then."""
    kind = torch.optim.AdamW if make is fused_adam else torch.optim.SGD
    lr = 0.05 if make is fused_adam else 0.5
    made = {"optimizer": make}
    unfused = {"optimizer": lambda parameters: kind(parameters, lr=lr)}
    how: dict[str, Any] = {"init_scale": init_scale, "max_epochs": 4}
    with pytest.warns(
        UserWarning, match=rf"{kind.__name__}\(fused=True\) under a grad"
    ):
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
    expected = big_batch(SEQUENCES, epochs=1, dtype=torch.float32).losses[0]
    assert float(once.loss) == pytest.approx(expected, rel=1e-2)


# ---- checkpoints inside a window -----------------------------------------------------


@pytest.mark.parametrize("at", [1, 5])
def test_resumed_inside_a_scaled_window_equals_uninterrupted(
    tmp_path: Path, at: int
) -> None:
    """The partial gradients hold the scaler's factor, which is saved as well."""
    path = tmp_path / "inside.ckpt"
    how: dict[str, Any] = {"batches": lambda sizes: Resumable()}
    saved = fit_scaled("mixin", Plain, Saving(path, at), init_scale=OVERFLOWS, **how)
    again = fit_scaled("mixin", ckpt_path=path, **how)
    assert apart(again, saved) <= 1e-6


@pytest.mark.parametrize(
    ("saved_in", "resumed_in"),
    [
        ("16-mixed", "bf16-mixed"),
        ("16-mixed", "32-true"),
        ("32-true", "16-mixed"),
    ],
)
def test_window_resumed_in_another_precision_keeps_its_scale(
    tmp_path: Path, saved_in: str, resumed_in: str
) -> None:
    """What was saved carries the scaler's factor, and the rest another or none."""
    path = tmp_path / "inside.ckpt"
    how: dict[str, Any] = {"batches": lambda sizes: Resumable()}
    fit_scaled("mixin", Plain, Saving(path, 5), precision=saved_in, **how)
    found, reference = Gradients(), Gradients()
    fit_scaled("mixin", Plain, found, precision=resumed_in, ckpt_path=path, **how)
    fit_scaled("mixin", Plain, reference, precision="32-true", **how)
    norms = [[float(each.norm()) for each in seen.seen] for seen in (found, reference)]
    assert norms[0] == pytest.approx(norms[1][-len(norms[0]) :], rel=0.02)


# ---- schedulers ----------------------------------------------------------------------

MADE: dict[str, Any] = {"dtype": torch.float32, "scheduler": "step"}
STEP = "lr_scheduler_step"


def own_step(scheduler: Any, metric: Any) -> None:
    scheduler.step()


class OfTheInstance(Plain):
    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.lr_scheduler_step = own_step


KINDS: dict[str, Any] = {
    "none": Plain,
    "with super": hooked(
        Plain,
        lr_scheduler_step=lambda self, *args: Plain.lr_scheduler_step(self, *args),
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
    moves by epoch is never held. After the fit nothing is left of it."""
    before = vars(KINDS[kind]()).get(STEP)
    made = {**MADE, **made, "options": {"hold_schedulers": hold}}
    fitted = fit(front, KINDS[kind], made=made, max_epochs=4, **scaled(2.0**28))
    skipped = windows_of(fitted).num_skipped_steps
    assert 0 < skipped < fitted.global_step == 12
    moved = fitted.lr_scheduler_configs[0].scheduler.last_epoch
    by_step = 12 - (skipped if hold else 0)
    assert moved == (4 if made["scheduler"] == "epoch" else by_step)
    assert vars(fitted.lightning_module).get(STEP) is before


class Deaf:
    """A scheduler that is none of torch's: its step wants a number."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.state_dict: Any = dict
        self.load_state_dict: Any = print

    def step(self, number: int) -> None: ...


def deaf(self: Any) -> Any:
    optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
    return [optimizer], [{"scheduler": Deaf(optimizer), "interval": "step"}]


def test_a_scheduler_of_another_kind_is_refused_before_training() -> None:
    """By Lightning's own check, which takes a module with a hook to know better."""
    made = {**MADE, "options": {"hold_schedulers": True}}
    with pytest.raises(MisconfigurationException, match="scheduler `Deaf` doesn't fol"):
        fit("mixin", hooked(Plain, configure_optimizers=deaf), made=made, **scaled())


@pytest.mark.parametrize("is_scaled", [True, False])
def test_nothing_stays_after_an_error_nor_in_a_copy(is_scaled: bool) -> None:
    """And without a scaler nothing is put between."""
    seen: list[bool] = []
    copies: list[Any] = []

    def fail(trainer: Any, module: Any) -> None:
        seen.append(STEP in vars(module))
        copies.extend(send(module) for send in SENT.values())
        raise RuntimeError("on purpose")

    module = Mixed(**MADE)
    module.hold_schedulers = True
    fails = LambdaCallback(on_train_epoch_end=fail)
    how = scaled() if is_scaled else {}
    with pytest.raises(RuntimeError, match="on purpose"):
        trainer(WINDOW, callbacks=[fails], **how).fit(module, ragged(RAGGED))
    assert seen == [is_scaled]
    for each in copies:
        trainer(WINDOW, max_epochs=1, **how).fit(each, ragged(RAGGED))
    assert not any(STEP in vars(each) for each in (module, *copies))
