"""Schedulers that hold their place where a gradient scaler skips a step, if asked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import LambdaCallback

from tests.helpers import trainer
from tests.lit.fronts import RAGGED, WINDOW, fit, ragged, windows_of
from tests.recording import SENT
from tests.zoo import Mixed, Plain, hooked, on_front, scaled

pytestmark = [
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step..` before"),
    pytest.mark.filterwarnings("ignore:SGD.fused=True. under a gradient scaler"),
]
MADE: dict[str, Any] = {"dtype": torch.float32, "scheduler": "step"}
STEP = "lr_scheduler_step"


class Deaf:
    """A scheduler that is none of torch's: its step wants a number."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.last_epoch = optimizer, 0

    def step(self, number: int) -> None:
        self.last_epoch = number

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def deaf(self: Any) -> Any:
    optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
    config = {"scheduler": Deaf(optimizer), "interval": "step"}
    return {"optimizer": optimizer, "lr_scheduler": config}


def fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, fused=True)


def own_step(scheduler: Any, metric: Any) -> None:
    scheduler.step()


class OfTheInstance(Plain):
    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.lr_scheduler_step = own_step


DEAF = hooked(Plain, configure_optimizers=deaf)
KINDS: dict[str, Any] = {
    "none": Plain,
    "with super": hooked(
        Plain,
        lr_scheduler_step=lambda self, *args: Plain.lr_scheduler_step(self, *args),
    ),
    "without super": hooked(
        Plain, lr_scheduler_step=lambda self, *args: own_step(*args)
    ),
    "of the instance": OfTheInstance,
    "of another kind": hooked(
        DEAF, lr_scheduler_step=lambda self, s, metric: s.step(s.last_epoch + 1)
    ),
}


@pytest.mark.parametrize("hold", [False, True])
@pytest.mark.parametrize(
    ("front", "kind", "late", "made"),
    [
        *(("mixin", kind, False, {}) for kind in KINDS),
        *(("mixin", kind, True, {}) for kind in list(KINDS)[:4]),
        ("callback", "none", False, {}),
        ("mixin", "none", False, {"optimizer": fused}),
        ("mixin", "none", False, {"scheduler": "epoch"}),
        ("callback", "none", False, {"scheduler": "epoch"}),
    ],
)
def test_scheduler_is_held_back_only_if_asked(
    front: str, kind: str, late: bool, made: Any, hold: bool
) -> None:
    """keras#20878, holocron#504: a skipped step moves Lightning's scheduler. One that
    moves by epoch is never held; `late` asks while training runs."""

    def ask(trainer: Any, module: Any) -> None:
        module.hold_schedulers = hold

    asks = [LambdaCallback(on_train_epoch_start=ask)] if late else []
    before = vars(KINDS[kind]()).get(STEP)
    made = {**MADE, **made, "options": {"hold_schedulers": hold is not late}}
    fitted = fit(front, KINDS[kind], *asks, made=made, max_epochs=4, **scaled(2.0**28))
    skipped = windows_of(fitted).num_skipped_steps
    assert 0 < skipped < fitted.global_step == 12
    moved = fitted.lr_scheduler_configs[0].scheduler.last_epoch
    by_step = 12 - (skipped if hold else 0)
    assert moved == (4 if made["scheduler"] == "epoch" else by_step)
    assert vars(fitted.lightning_module).get(STEP) is before


@pytest.mark.parametrize("hold", [True, False])
@pytest.mark.parametrize("again", [True, False])
def test_a_scheduler_of_another_kind_is_refused_before_training(
    hold: bool, again: bool
) -> None:
    """Lightning's own check; nothing of an earlier fit hides it."""
    module, _ = on_front("mixin", DEAF, options={"hold_schedulers": hold}, **MADE)
    if again:
        module.configure_optimizers = lambda: Plain.configure_optimizers(module)
        trainer(WINDOW, max_epochs=1, **scaled()).fit(module, ragged(RAGGED))
        del module.configure_optimizers
    with pytest.raises(MisconfigurationException, match="scheduler `Deaf` doesn't fol"):
        trainer(WINDOW, **scaled()).fit(module, ragged(RAGGED))


@pytest.mark.parametrize("is_scaled", [True, False])
def test_nothing_stays_after_an_error(is_scaled: bool) -> None:
    """And without a scaler nothing is put between."""
    seen: list[bool] = []

    def fail(trainer: Any, module: Any) -> None:
        seen.append(STEP in vars(module))
        raise RuntimeError("on purpose")

    module, _ = on_front("mixin", options={"hold_schedulers": True}, **MADE)
    fails = LambdaCallback(on_train_epoch_end=fail)
    how = scaled() if is_scaled else {}
    with pytest.raises(RuntimeError, match="on purpose"):
        trainer(WINDOW, callbacks=[fails], **how).fit(module, ragged(RAGGED))
    assert seen == [is_scaled]
    assert STEP not in vars(module)


@pytest.mark.parametrize("way", SENT)
def test_a_module_copied_within_a_fit_trains_by_itself(way: str) -> None:
    copies: list[Any] = []
    copying = LambdaCallback(
        on_train_epoch_start=lambda trainer, module: copies.append(SENT[way](module))
    )
    module: Any = Mixed(**MADE)
    module.hold_schedulers = True
    trainer(WINDOW, callbacks=[copying], **scaled()).fit(module, ragged(RAGGED))
    trainer(WINDOW, **scaled()).fit(copies[-1], ragged(RAGGED))
    assert STEP not in vars(copies[-1])
