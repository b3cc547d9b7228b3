"""A checkpoint taken inside a window, or inside a micro-batch, and resumed."""

from __future__ import annotations

import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import (
    ModelCheckpoint,
    OnExceptionCheckpoint,
    model_checkpoint,
)

from tests.helpers import NAIVE, deviation, trainer
from tests.lit.fronts import (
    WINDOW,
    Mixed,
    Plain,
    micro_batches,
    plain_token_loss,
    windows_of,
)
from tests.lit.resume.resuming import (
    EXACT,
    SEQUENCES,
    START,
    Resumable,
    Saving,
    holds,
    make,
    resumed,
    saved,
    strip,
)
from trainkit import AccumulationCallback, PerToken


def off(module: Any, reference: Any = EXACT) -> float:
    """How far it is from an uninterrupted run."""
    return deviation(module, reference, START)


class Validated(Mixed):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        plain_token_loss(self.net, batch)


class Examined(Plain):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        plain_token_loss(self.net, batch)


# ---- between micro-batches -----------------------------------------------------------


@pytest.mark.parametrize("front", ["mixin", "callback"])
def test_resumed_inside_a_window_equals_uninterrupted(
    tmp_path: Path, front: str
) -> None:
    """transformers#22143, with AdamW, after every kind of batch of two epochs, which
    the fronts share out."""
    places = (0, 1, 2, 3, 4, 6, 8, 9, 10, 12, 18)[front == "callback" :: 2]
    saving = [Saving(tmp_path / f"{at}.ckpt", at) for at in places]
    module, ours = make(front)
    trainer(WINDOW, callbacks=[*saving, *ours]).fit(module, Resumable())
    assert off(module) <= 1e-10
    for each in saving:
        assert off(resumed(each.path, front)) <= 1e-10, each.at


@pytest.mark.parametrize("at", [3, 5, 9])
def test_without_its_state_a_window_deviates_and_is_said(
    tmp_path: Path, at: int
) -> None:
    """Negative control: the checkpoint as plain Lightning would have written it. Of one
    between windows nothing is missing."""
    path, lost = tmp_path / "one.ckpt", (at + 1) % WINDOW
    module = saved(path, at)
    state = holds(path)
    if at != 5:
        assert set(state) == {"num_windows", "measured", "ledger"}
        assert off(resumed(strip(path))) <= 1e-10
        return
    assert set(state["gradients"]) == {name for name, _ in module.named_parameters()}
    assert float(state["windows"][0]["totals"]["weight"]) == float(
        sum((b["labels"] != -100).sum() for b in Resumable().batches[4:6])
    )
    with pytest.warns(UserWarning, match=f"does not hold the {lost} micro-batches"):
        module = resumed(strip(path))
    assert off(module) > NAIVE


class Clock:
    """Each look at it is a second later."""

    def __init__(self) -> None:
        self.now = 0

    def monotonic(self) -> int:
        self.now += 1
        return self.now


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning")
@pytest.mark.parametrize(
    ("when", "inside"),
    [
        ({"every_n_train_steps": 1}, False),
        ({"train_time_interval": timedelta(seconds=6)}, True),
    ],
)
def test_resumed_from_model_checkpoint_equals_uninterrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: Any, inside: bool
) -> None:
    """pytorch-lightning#17903: by steps it saves after windows, by time anywhere."""
    monkeypatch.setattr(model_checkpoint, "time", Clock())
    saver = ModelCheckpoint(tmp_path, save_top_k=-1, **when)
    options = {"callbacks": [saver], "enable_checkpointing": True}
    trainer(WINDOW, **options).fit(Mixed(optimizer="adamw"), Resumable())
    files = sorted(tmp_path.glob("*.ckpt"))
    assert len(files) > 1
    assert any("windows" in holds(path) for path in files) == inside
    for path in files[1::2]:
        assert off(resumed(path)) <= 1e-10


@pytest.mark.parametrize("interval", [1, 3])
def test_resumed_from_validation_inside_a_window_equals_uninterrupted(
    tmp_path: Path, interval: int
) -> None:
    """The validation's own hooks save, where many keep the best model."""
    path = tmp_path / "validation.ckpt"
    options = {"val_check_interval": interval, "num_sanity_val_steps": 0}
    for resume in (None, path):
        module = Validated(optimizer="adamw")
        saving = [] if resume else [Saving(path, 5, "on_validation_end")]
        trainer(WINDOW, callbacks=saving, **options).fit(
            module, Resumable(), micro_batches(SEQUENCES, [4]), ckpt_path=resume
        )
        assert off(module) <= 1e-10


def test_saved_twice_in_one_window_across_a_resume_equals_uninterrupted(
    tmp_path: Path,
) -> None:
    """The second checkpoint holds what the first one had carried over."""
    first, second = tmp_path / "first.ckpt", tmp_path / "second.ckpt"
    saved(first, 4)
    again, _ = make("mixin")
    trainer(WINDOW, callbacks=[Saving(second, 6)]).fit(
        again, Resumable(), ckpt_path=first
    )
    assert int(holds(second)["windows"][0]["totals"]["count"]) == 3
    assert off(resumed(second)) <= 1e-10


def test_what_a_checkpoint_carries_into_another_fit(tmp_path: Path) -> None:
    """With another window length (speculators#859, pytorch-lightning#8493) Lightning
    zeroes at once, and the carried micro-batches are counted. What was loaded to be
    tested is not resumed."""
    path = tmp_path / "inside.ckpt"
    saved(path, 5)
    shorter = trainer(3, max_epochs=1)
    with pytest.warns(UserWarning, match="an open window of 2 micro-batches"):
        shorter.fit(Mixed(optimizer="adamw"), Resumable(), ckpt_path=path)
    window = windows_of(shorter).last_window
    assert window is not None
    assert int(window.num_micro_batches) == 1
    fitted = trainer(WINDOW, callbacks=[AccumulationCallback(PerToken())])
    fitted.test(Examined(), Resumable(), ckpt_path=path, verbose=False)
    module = Examined(optimizer="adamw")
    fitted.fit(module, Resumable())
    assert off(module) <= 1e-10


# ---- while a micro-batch is under way, or has failed ---------------------------------


class Failing(Mixed):
    """Its forward pass fails once, as an out-of-memory would."""

    at = -1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == self.at:
            raise MemoryError
        return super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:`.fit.ckpt_path=None.` was called:UserWarning")
@pytest.mark.filterwarnings('ignore:.fit.ckpt_path="last". is set, but:UserWarning')
@pytest.mark.parametrize("at", [0, 3, 6])
def test_resumed_from_on_exception_checkpoint_equals_uninterrupted(
    tmp_path: Path, at: int
) -> None:
    module = Failing(optimizer="adamw")
    module.at = at
    saver = OnExceptionCheckpoint(tmp_path)
    fitted = trainer(WINDOW, callbacks=[saver], enable_checkpointing=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "accumulation: an open window")
        with pytest.raises(MemoryError):
            fitted.fit(module, Resumable())
    assert off(resumed(tmp_path / "on_exception.ckpt", replay=1)) <= 1e-10


@pytest.mark.parametrize(
    ("hook", "at"),
    [
        ("on_after_backward", 5),
        ("on_before_optimizer_step", 9),
    ],
)
def test_saved_while_a_micro_batch_is_under_way_is_said_twice(
    tmp_path: Path, hook: str, at: int
) -> None:
    """Torn: the resumed run repeats that micro-batch. Said when saved and resumed."""
    path, lost = tmp_path / "torn.ckpt", at % WINDOW
    text = f"first {lost} micro-batches are not in it: a micro-batch is under way"
    with pytest.warns(UserWarning, match=text):
        saved(path, at, hook)
    with pytest.warns(UserWarning, match=f"does not hold the {lost} micro-batches"):
        resumed(path, replay=1)


@pytest.mark.parametrize(
    ("hook", "at", "window"),
    [("on_after_backward", 5, 1), ("on_before_optimizer_step", 5, 1), ("", 6, WINDOW)],
)
def test_saved_where_nothing_is_torn_equals_uninterrupted(
    tmp_path: Path, hook: str, at: int, window: int
) -> None:
    """The resumed run repeats all there was of a window of one. Before its backward
    pass, inside `training_step`, a window is whole up to the batch before."""
    path = tmp_path / "one.ckpt"
    saving = Saving(path, at, hook or "unused")

    class SavingInside(Mixed):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if not hook:
                saving.save(self.trainer)
            return super().training_step(batch, batch_idx)

    module, again = SavingInside(optimizer="adamw"), Mixed(optimizer="adamw")
    trainer(window, callbacks=[saving]).fit(module, Resumable())
    trainer(window).fit(again, Resumable(replay=1), ckpt_path=path)
    assert off(again, module) <= 1e-10
