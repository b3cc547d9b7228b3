"""A scheduled training that is resumed, at any batch, equals the uninterrupted one."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import NAIVE
from tests.lit.fronts import micro_batches
from tests.lit.resume.resuming import Resumable, Saving
from tests.lit.schedule.scheduling import (
    EPOCHS,
    EXACT,
    FRONTS,
    PLANS,
    SEQUENCES,
    fitted,
    make,
    number_of,
    off,
    schedule,
    token_counts,
    windows_of_plan,
)
from trainkit import AccumulationSchedule

pytestmark = pytest.mark.filterwarnings("ignore:accumulate_grad_batches=.. the epoch")
UP_AND_DOWN, EVERY_STEP = "up and down in mid-epoch", "every step another"
END, VALIDATION = "on_train_batch_end", "on_validation_end"


class Keeping(Saving):
    """Saves at every call of a hook, into a file of its own."""

    def __init__(self, folder: Path, hook: str = END) -> None:
        self.folder = folder
        setattr(self, hook, self.keep)

    def keep(self, trainer: Any, *args: Any) -> None:
        at = trainer.fit_loop.epoch_loop.total_batch_idx
        trainer.save_checkpoint(self.folder / f"{at:02}.ckpt")


@pytest.mark.parametrize(
    ("plan", "front", "hook", "interval", "mine"),
    [
        (UP_AND_DOWN, "mixin", END, None, slice(0, None, 8)),
        (EVERY_STEP, "callback", END, None, slice(1, None, 9)),
        (EVERY_STEP, "manual", END, None, slice(3, None, 9)),
        ("by tokens", "mixin", END, None, slice(1, None, 12)),
        ("by tokens", "callback", END, None, slice(3, None, 12)),
        ("by tokens", "manual", END, None, slice(5, None, 12)),
        # From `on_train_epoch_start` Lightning itself loses an epoch, with any window.
        ("fewer by epoch", "mixin", "on_train_epoch_end", None, slice(0, 1)),
        ("more by epoch", "callback", "on_train_epoch_end", None, slice(1, 2)),
        # Lightning clears gradients before it validates, by `_should_accumulate`.
        (UP_AND_DOWN, "callback", VALIDATION, 1, slice(2, None, 8)),
        (UP_AND_DOWN, "manual", VALIDATION, 3, slice(0, None, 3)),
        ("by tokens", "mixin", VALIDATION, 3, slice(1, None, 3)),
    ],
)
def test_resumed_at_any_batch_equals_uninterrupted(
    tmp_path: Path, plan: str, front: str, hook: str, interval: Any, mine: slice
) -> None:
    """pytorch-lightning#5334, #8493: inside windows, at their edges, at the end of an
    epoch, with AdamW. The fronts share out some batches of each plan."""
    epochs = EPOCHS if hook == "on_train_epoch_end" else 2
    windows = windows_of_plan(*PLANS[plan], epochs=epochs)

    def run(*callbacks: Any, resume: Path | None = None) -> Any:
        how: Any = {"val_check_interval": interval, "num_sanity_val_steps": 0}
        module, _ = make(front)
        if interval is not None:
            module.validation_step = lambda batch, batch_idx: module.loss_of(batch)
            module.val_dataloader = lambda: micro_batches(SEQUENCES, [4])
        how |= {"module": module, "loader": Resumable(), "max_epochs": epochs}
        _, fit = fitted(front, schedule(plan), *callbacks, resume=resume, **how)
        assert off(module, windows) <= EXACT, resume
        assert fit.global_step == number_of(windows)

    run(Keeping(tmp_path, hook))
    paths = sorted(tmp_path.glob("*.ckpt"))
    assert len(paths) == (3 if epochs == EPOCHS else 20 // (interval or 1))
    for path in paths[mine]:
        held = torch.load(path, weights_only=True)["callbacks"]
        kinds = {type(value) for value in held["AccumulationSchedule"].values()}
        assert kinds <= {int, float, str}
        run(resume=path)


def test_plans_that_are_resumed_change_in_mid_epoch() -> None:
    """Else this page proves less than it says."""
    for plan in (UP_AND_DOWN, EVERY_STEP, "by tokens"):
        windows = windows_of_plan(*PLANS[plan], epochs=2)
        assert any(len({len(w) for w in ws[:-1]}) > 1 for ws in windows)


def saved(path: Path, ours: Any, at: int, front: str = "mixin", **how: Any) -> Path:
    """The checkpoint of a run, in `path`, after a batch."""
    callbacks = [] if ours is None else [ours]
    fitted(front, *callbacks, Saving(path, at), loader=Resumable(), **how)
    return path


def changed(path: Path, change: Any) -> Path:
    checkpoint = torch.load(path, weights_only=True)
    change(checkpoint)
    torch.save(checkpoint, path)
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "old.ckpt"


@pytest.mark.parametrize("at", [2, 3, 6, 9, 12])
@pytest.mark.filterwarnings("ignore:accumulation. an open window")
def test_resumed_without_the_schedules_state_deviates_inside_windows(
    path: Path, at: int
) -> None:
    """Negative control: where the open window began is not in the batch's number. At
    an edge nothing is missing."""
    saved(path, schedule(EVERY_STEP), at, max_epochs=2)
    changed(path, lambda held: held["callbacks"].pop("AccumulationSchedule"))
    how: dict[str, Any] = {"loader": Resumable(), "resume": path, "max_epochs": 2}
    module, _ = fitted("mixin", schedule(EVERY_STEP), **how)
    found = off(module, windows_of_plan(*PLANS[EVERY_STEP], epochs=2))
    assert found > NAIVE if at in (2, 6, 12) else found <= EXACT


# ---- another plan than before --------------------------------------------------------

Plan = tuple[dict[int, int], Any] | int
OLD, EDITED = {0: 4, 1: 5, 3: 3}, {0: 1, 4: 3, 5: 2}


@pytest.mark.parametrize(
    ("front", "old", "at", "new"),
    [
        *(
            (front, (OLD, unit), at, (EDITED, unit))
            for at, front, unit in zip(
                range(3, 20, 5), cycle(FRONTS), cycle(["step", "epoch"])
            )
        ),
        ("mixin", 2, 9, ({0: 2, 7: 5}, "step")),  # added between epochs
        # Added in mid-epoch, at an edge which is no edge of the new size.
        ("mixin", 4, 3, ({0: 3}, "epoch")),
        ("callback", 4, 3, ({0: 5}, "epoch")),
        ("manual", 4, 3, ({0: 3}, "epoch")),
        ("mixin", ({0: 4, 1: 2}, "epoch"), 9, 1),  # taken out
    ],
)
@pytest.mark.filterwarnings("ignore:.*add the following callbacks. ..AccumulationSche")
def test_resumed_with_another_plan_finishes_the_open_window(
    path: Path, front: str, old: Plan, at: int, new: Plan
) -> None:
    """speculators#859, transformers#43708: the first window after a resume is not cut
    short; the new plan, or the Trainer's own number, holds from the next on, within the
    same epoch. The control: the new plan from the start."""

    def run(plan: Plan, *callbacks: Any, **how: Any) -> tuple[Any, Any]:
        if isinstance(plan, int):
            return fitted(front, *callbacks, loader=Resumable(), accumulate=plan, **how)
        ours = AccumulationSchedule(plan[0], unit=plan[1])
        return fitted(front, ours, *callbacks, loader=Resumable(), **how)

    run(old, Saving(path, at))
    module, fit = run(new, resume=path)
    by = [({0: p}, "step") if isinstance(p, int) else p for p in (old, new)]
    before = enumerate(windows_of_plan(*by[0])[: at // 10 + 1])
    begun = [[w for w in ws if 10 * epoch + w.start <= at] for epoch, ws in before]
    windows, fresh = windows_of_plan(*by[1], begun=begun), windows_of_plan(*by[1])
    assert fit.global_step == number_of(windows)
    assert off(module, windows) <= EXACT
    assert windows == fresh or off(module, fresh) > NAIVE


# ---- tokens --------------------------------------------------------------------------


def test_a_plan_by_tokens_resumes_a_plan_by_steps_exactly(path: Path) -> None:
    """Tokens are counted by whatever plan. Counted from the checkpoint on, as the
    control counts them, the window of epoch 0 that is next would have another size."""
    saved(path, AccumulationSchedule({0: 4}, unit="step"), 5)
    changes_at = sum(token_counts()[:4])  # the first window of 4, 4 and 2
    by_tokens = AccumulationSchedule({0: 4, changes_at: 1}, unit="tokens")
    module, _ = fitted("mixin", by_tokens, loader=Resumable(), resume=path)
    ones = [[range(i, i + 1) for i in range(10)]] * 2
    two = [range(4), range(4, 8)]
    assert off(module, [[*two, range(8, 9), range(9, 10)], *ones]) <= EXACT
    assert off(module, [[*two, range(8, 10)], *ones]) > NAIVE
