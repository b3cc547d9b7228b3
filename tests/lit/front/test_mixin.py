"""The mixin: where it stands, what a subclass may override, and what brings it."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import pytorch_lightning as old
import torch
from lightning.pytorch.plugins import MixedPrecision

from tests.helpers import (
    TOLERANCE,
    TokenModule,
    TokenNet,
    deviation,
    loader,
    ragged_sequences,
    token_loss,
    train_on_windows,
    trainer,
    windows_over_ranks,
)
from trainkit import AccumulationCallback, AccumulationMixin, PerToken
from trainkit.errors import TrainkitError
from trainkit.lit.front.mixin import MixinCallback

EXACT = TOLERANCE[torch.float64]
DATA = ragged_sequences(38)
BATCH, WINDOW = 4, 4


class Mixed(AccumulationMixin, TokenModule):
    accumulation = PerToken()


def fitted(module: Any, *callbacks: pl.Callback, **options: Any) -> Any:
    fit = trainer(WINDOW, callbacks=list(callbacks), **options)
    fit.fit(module, loader(DATA, BATCH))
    return module


def is_exact(module: torch.nn.Module) -> bool:
    start, reference = (TokenModule(dtype=torch.float64) for _ in range(2))
    train_on_windows(reference, windows_over_ranks(DATA, BATCH, WINDOW, 1))
    return deviation(module, reference, start) <= EXACT


# ---- the order of the bases ----------------------------------------------------------


@pytest.mark.parametrize("base", [pl.LightningModule, old.LightningModule])
def test_wrong_order_is_refused_when_the_class_is_made(base: type) -> None:
    with pytest.raises(TrainkitError, match=r"class Late: AccumulationMixin must come"):
        type("Late", (base, AccumulationMixin), {})


def test_wrong_order_behind_a_module_of_ones_own_is_refused() -> None:
    with pytest.raises(TrainkitError, match=r"Write class Late\(AccumulationMixin, "):
        type("Late", (TokenModule, AccumulationMixin), {})


class Brings(AccumulationMixin):
    """The mixin inside another, made before any LightningModule is there."""

    accumulation = PerToken()


class Through(Brings, TokenModule): ...


class Below(Through):
    """A subclass of a subclass, which overrides one hook and extends it."""

    def configure_callbacks(self) -> Any:
        return [*super().configure_callbacks(), pl.Callback()]


@pytest.mark.parametrize("kind", [Mixed, Through, Below])
def test_subclass_equals_the_big_batch(kind: type[TokenModule]) -> None:
    assert is_exact(fitted(kind(dtype=torch.float64)))


class OldModule(old.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = TokenNet(dtype=torch.float64)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return token_loss(self.net, batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class OldMixed(AccumulationMixin, OldModule):  # type: ignore[misc]  # either namespace
    accumulation = PerToken()


def old_trainer(*callbacks: Any) -> old.Trainer:
    return old.Trainer(
        accelerator="cpu",
        max_epochs=2,
        accumulate_grad_batches=WINDOW,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
    )


def test_pytorch_lightning_equals_the_big_batch() -> None:
    """The other namespace, whose classes are not the same."""
    for module, callbacks in (
        (OldMixed(), []),
        (OldModule(), [AccumulationCallback(PerToken())]),
    ):
        old_trainer(*callbacks).fit(module, loader(DATA, BATCH))
        assert is_exact(module)


# ---- overridden hooks ----------------------------------------------------------------


class ForgetsCallbacks(Mixed):
    def configure_callbacks(self) -> Any:
        return []


class Foreign:
    """A base class of somebody else, which does not know that others follow."""

    def configure_callbacks(self) -> Any:
        return []


class Shadowed(Foreign, Mixed): ...  # type: ignore[misc]  # that is the mistake


@pytest.mark.parametrize("kind", [ForgetsCallbacks, Shadowed])
def test_configure_callbacks_without_super_is_refused(kind: type[Mixed]) -> None:
    text = rf"{kind.__name__}.configure_callbacks\(\): it must call super\(\)"
    with pytest.raises(TrainkitError, match=text):
        fitted(kind())


class Scheduled(Mixed):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        interval = {"scheduler": schedule, "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": interval}


class Overrides(Mixed):
    """Hooks that the mixin leaves to the module: none of them needs `super()`."""

    def on_before_optimizer_step(self, optimizer: Any) -> None: ...
    def on_before_backward(self, loss: Any) -> None: ...
    def on_after_backward(self) -> None: ...
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None: ...
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None: ...
    def on_before_zero_grad(self, optimizer: Any) -> None: ...
    def on_train_start(self) -> None: ...
    def on_train_epoch_end(self) -> None: ...
    def on_fit_start(self) -> None: ...
    def setup(self, stage: str) -> None: ...
    def teardown(self, stage: str) -> None: ...
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None: ...


def test_overridden_hooks_without_super_equal_the_big_batch() -> None:
    assert is_exact(fitted(Overrides(dtype=torch.float64)))


class ChoosesLate(AccumulationMixin, TokenModule):
    """Knows what a batch weighs once the data are there."""

    def setup(self, stage: str) -> None:
        self.accumulation = PerToken()


def test_strategy_chosen_in_setup_equals_the_big_batch() -> None:
    assert is_exact(fitted(ChoosesLate(dtype=torch.float64)))


@pytest.mark.parametrize("wrong", [PerToken, "per_token"])
def test_strategy_that_is_none_is_refused(wrong: Any) -> None:
    module = Mixed()
    module.accumulation = wrong
    with pytest.raises(TrainkitError, match="strategy: must be an AccumulationStr"):
        fitted(module)


# ---- one driver ----------------------------------------------------------------------


def test_mixin_and_callback_together_are_refused() -> None:
    with pytest.raises(TrainkitError, match=r"one driver, and 2 are present \(Accu"):
        fitted(Mixed(), AccumulationCallback(PerToken()))


def test_two_callbacks_are_refused() -> None:
    both = [AccumulationCallback(PerToken()) for _ in range(2)]
    with pytest.raises(TrainkitError, match="remove AccumulationCallback from the"):
        fitted(TokenModule(), *both)


def test_one_trainer_fits_several_modules_one_after_another() -> None:
    """A mixin's callback stays in the Trainer's list: it drives its own module only."""
    fit: Any = trainer(WINDOW)
    fit.fit(Mixed(dtype=torch.float64), loader(DATA, BATCH))
    for kind in (Mixed, ChoosesLate):
        fit.fit_loop.epoch_progress.reset()
        module = kind(dtype=torch.float64)
        fit.fit(module, loader(DATA, BATCH))
        assert is_exact(module)
    fit.fit_loop.epoch_progress.reset()
    plain = TokenModule(dtype=torch.float64)
    fit.fit(plain, loader(DATA, BATCH))
    assert not is_exact(plain)
    assert not any(isinstance(c, MixinCallback) for c in fit.callbacks)


# ---- schedulers and skipped steps ----------------------------------------------------


@pytest.mark.parametrize("hold", [False, True])
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_held_schedulers_count_the_steps_that_were_taken(hold: bool) -> None:
    """keras#20878: a step that the scaler skipped moves no schedule, if asked."""
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=2.0**28)
    precision = MixedPrecision("16-mixed", device="cpu", scaler=scaler)
    module = Scheduled()
    module.hold_schedulers = hold
    fit = trainer(WINDOW, max_epochs=4, plugins=[precision])
    fit.fit(module, loader(DATA, BATCH))
    skipped = module._windows().num_skipped_steps
    assert 0 < skipped < 12
    moved = fit.lr_scheduler_configs[0].scheduler.last_epoch
    assert moved == (12 - skipped if hold else 12)
    assert fit.global_step == 12
