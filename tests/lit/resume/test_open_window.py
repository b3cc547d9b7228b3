"""A checkpoint taken inside a window resumes exactly."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, model_checkpoint

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
)
from trainkit import AccumulationCallback, PerToken


class Validated(Mixed):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        plain_token_loss(self.net, batch)


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
    assert deviation(module, EXACT, START) <= 1e-10
    for each in saving:
        again = resumed(each.path, front)
        assert deviation(again, EXACT, START) <= 1e-10, each.at


def test_checkpoint_holds_partial_gradients_and_totals(tmp_path: Path) -> None:
    path = tmp_path / "inside.ckpt"
    module = Mixed()
    trainer(WINDOW, callbacks=[Saving(path, 5)]).fit(module, Resumable())
    state = holds(path)
    names = {name for name, _ in module.named_parameters()}
    assert set(state["gradients"]) == names
    assert float(state["windows"][0]["totals"]["weight"]) == float(
        sum((b["labels"] != -100).sum() for b in Resumable().batches[4:6])
    )


@pytest.mark.parametrize("at", [3, 7, 9])
def test_checkpoint_between_windows_holds_no_gradients(tmp_path: Path, at: int) -> None:
    path = tmp_path / "between.ckpt"
    trainer(WINDOW, callbacks=[Saving(path, at)]).fit(Mixed(), Resumable())
    assert set(holds(path)) == {"num_windows", "measured", "ledger"}


@pytest.mark.parametrize("at", [1, 5, 8])
def test_resumed_without_the_state_deviates_and_is_said(
    tmp_path: Path, at: int
) -> None:
    """Negative control: the checkpoint as plain Lightning would have written it."""
    path = tmp_path / "inside.ckpt"
    trainer(WINDOW, callbacks=[Saving(path, at)]).fit(
        Mixed(optimizer="adamw"), Resumable()
    )
    checkpoint = torch.load(path, weights_only=True)
    del checkpoint["trainkit"]
    torch.save(checkpoint, path)
    lost = (at + 1) % WINDOW
    with pytest.warns(UserWarning, match=f"does not hold the {lost} micro-batches"):
        module = resumed(path)
    assert deviation(module, EXACT, START) > NAIVE


@pytest.mark.parametrize("at", [3, 9])
def test_resumed_between_windows_without_the_state_is_exact_and_silent(
    tmp_path: Path, at: int
) -> None:
    path = tmp_path / "between.ckpt"
    trainer(WINDOW, callbacks=[Saving(path, at)]).fit(
        Mixed(optimizer="adamw"), Resumable()
    )
    checkpoint = torch.load(path, weights_only=True)
    del checkpoint["trainkit"]
    torch.save(checkpoint, path)
    assert deviation(resumed(path), EXACT, START) <= 1e-10


class Clock:
    """Each look at it is a second later."""

    def __init__(self) -> None:
        self.now = 0

    def monotonic(self) -> int:
        self.now += 1
        return self.now


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning")
@pytest.mark.parametrize("inside", [True, False])
def test_resumed_from_model_checkpoint_equals_uninterrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: bool
) -> None:
    """pytorch-lightning#17903: by steps it saves after windows, by time anywhere."""
    monkeypatch.setattr(model_checkpoint, "time", Clock())
    when: dict[str, Any] = {"every_n_train_steps": 1}
    if inside:
        when = {"train_time_interval": timedelta(seconds=6)}
    saver = ModelCheckpoint(tmp_path, save_top_k=-1, **when)
    module = Mixed(optimizer="adamw")
    options = {"callbacks": [saver], "enable_checkpointing": True}
    trainer(WINDOW, **options).fit(module, Resumable())
    files = sorted(tmp_path.glob("*.ckpt"))
    assert len(files) > 1
    assert any("windows" in holds(path) for path in files) == inside
    for path in files[1::2]:
        assert deviation(resumed(path), EXACT, START) <= 1e-10


@pytest.mark.parametrize("interval", [1, 3])
def test_resumed_from_validation_inside_a_window_equals_uninterrupted(
    tmp_path: Path, interval: int
) -> None:
    """The validation's own hooks save, where many keep the best model."""
    path = tmp_path / "validation.ckpt"
    saving = Saving(path, 5, "on_validation_end")
    module = Validated(optimizer="adamw")
    options = {"val_check_interval": interval, "num_sanity_val_steps": 0}
    trainer(WINDOW, callbacks=[saving], **options).fit(
        module, Resumable(), micro_batches(SEQUENCES, [4])
    )
    assert deviation(module, EXACT, START) <= 1e-10
    again = Validated(optimizer="adamw")
    trainer(WINDOW, **options).fit(
        again, Resumable(), micro_batches(SEQUENCES, [4]), ckpt_path=path
    )
    assert deviation(again, EXACT, START) <= 1e-10


def test_saved_twice_in_one_window_across_a_resume_equals_uninterrupted(
    tmp_path: Path,
) -> None:
    """The second checkpoint holds what the first one had carried over."""
    first, second = tmp_path / "first.ckpt", tmp_path / "second.ckpt"
    module, _ = make("mixin")
    trainer(WINDOW, callbacks=[Saving(first, 4)]).fit(module, Resumable())
    again, _ = make("mixin")
    trainer(WINDOW, callbacks=[Saving(second, 6)]).fit(
        again, Resumable(), ckpt_path=first
    )
    assert int(holds(second)["windows"][0]["totals"]["count"]) == 3
    assert deviation(resumed(second), EXACT, START) <= 1e-10


def test_resume_that_zeroes_says_how_much_the_carried_window_held(
    tmp_path: Path,
) -> None:
    """Resumed with another window length (speculators#859, pytorch-lightning#8493):
    Lightning zeroes at once, and the carried micro-batches are counted."""
    path = tmp_path / "inside.ckpt"
    trainer(WINDOW, callbacks=[Saving(path, 5)]).fit(Mixed(), Resumable())
    module = Mixed()
    fitted = trainer(3, max_epochs=1)
    with pytest.warns(UserWarning, match="an open window of 2 micro-batches"):
        fitted.fit(module, Resumable(), ckpt_path=path)
    window = windows_of(fitted).last_window
    assert window is not None
    assert int(window.num_micro_batches) == 1


def test_fit_after_testing_a_checkpoint_equals_fresh_fit(tmp_path: Path) -> None:
    """What was loaded to be tested is not resumed."""
    path = tmp_path / "inside.ckpt"
    trainer(WINDOW, callbacks=[Saving(path, 5)]).fit(Mixed(), Resumable())
    callback = AccumulationCallback(PerToken())
    fitted = trainer(WINDOW, callbacks=[callback])
    fitted.test(Examined(), Resumable(), ckpt_path=path, verbose=False)
    module = Examined(optimizer="adamw")
    fitted.fit(module, Resumable())
    assert deviation(module, EXACT, START) <= 1e-10


class Examined(Plain):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        plain_token_loss(self.net, batch)
