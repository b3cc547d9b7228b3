"""A scheduled training that is resumed, at any batch, equals the uninterrupted one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import NAIVE, trainer
from tests.lit.fronts import Plain, micro_batches, plain_token_loss
from tests.lit.resume.resuming import Resumable, Saving
from tests.lit.schedule.scheduling import (
    EPOCHS,
    FRONTS,
    PLANS,
    SEQUENCES,
    Manual,
    Watch,
    big_batch_over,
    fitted,
    off,
    reference,
    schedule,
    token_counts,
    windows_of_plan,
)
from trainkit import AccumulationSchedule

pytestmark = pytest.mark.filterwarnings("ignore:accumulate_grad_batches=.. the epoch")
EXACT = 1e-10
RESUMED = ["up and down in mid-epoch", "every step another", "by tokens"]
TWO = 2  # epochs


class Keeping(Saving):
    """Saves at every batch, into a file of its own."""

    def __init__(self, folder: Path, hook: str = "on_train_batch_end") -> None:
        self.folder = folder
        setattr(self, hook, self.keep)

    def keep(self, trainer: Any, *args: Any) -> None:
        at = trainer.fit_loop.epoch_loop.total_batch_idx
        trainer.save_checkpoint(self.folder / f"{at:02}.ckpt")


def files(folder: Path, number: int) -> Iterator[Path]:
    found = sorted(folder.glob("*.ckpt"))
    assert len(found) == number
    yield from found


@pytest.mark.parametrize(
    ("plan", "front", "mine"),
    [
        ("up and down in mid-epoch", "mixin", slice(0, None, 3)),
        ("every step another", "callback", slice(1, None, 4)),
        ("every step another", "manual", slice(3, None, 4)),
        *(
            ("by tokens", each, slice(start, None, 6))
            for start, each in zip((1, 3, 5), FRONTS, strict=True)
        ),
    ],
)
def test_resumed_at_any_batch_equals_uninterrupted(
    tmp_path: Path, plan: str, front: str, mine: slice
) -> None:
    """pytorch-lightning#5334, #8493: inside windows, at their edges, at the end of an
    epoch, with AdamW. The fronts share out every second batch of a plan."""
    end, num_steps = reference(plan, epochs=TWO)
    how: dict[str, Any] = {"loader": Resumable(), "max_epochs": TWO}
    module, _ = fitted(front, schedule(plan), Keeping(tmp_path), **how)
    assert off(module, end) <= EXACT
    for path in list(files(tmp_path, 10 * TWO))[mine]:
        held = torch.load(path, weights_only=True)["callbacks"]
        kinds = {type(value) for value in held["AccumulationSchedule"].values()}
        assert kinds <= {int, float, str}
        again, fit = fitted(front, schedule(plan), resume=path, **how)
        assert off(again, end) <= EXACT, path.name
        assert fit.global_step == num_steps


@pytest.mark.parametrize(
    ("plan", "front"),
    [
        ("fewer by epoch", "mixin"),
        ("more by epoch", "callback"),
        ("fewer by epoch", "manual"),
    ],
)
def test_resumed_between_epochs_equals_uninterrupted(
    tmp_path: Path, plan: str, front: str
) -> None:
    """From `on_train_epoch_start` Lightning itself loses an epoch, with any window."""
    end, num_steps = reference(plan)
    keeping = Keeping(tmp_path, "on_train_epoch_end")
    fitted(front, schedule(plan), keeping, loader=Resumable())
    for path in files(tmp_path, EPOCHS):
        again, fit = fitted(front, schedule(plan), loader=Resumable(), resume=path)
        assert off(again, end) <= EXACT, path.name
        assert fit.global_step == num_steps


EVERY_STEP = "every step another"


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of a run, one after each batch."""
    folder = tmp_path_factory.mktemp("kept")
    keeping = Keeping(folder)
    fitted("mixin", schedule(EVERY_STEP), keeping, loader=Resumable(), max_epochs=TWO)
    return folder


def resumed_without_its_state(kept: Path, folder: Path, at: int) -> float:
    """How far off a run ends that lacks the schedule's state."""
    path = folder / "at.ckpt"
    checkpoint = torch.load(kept / f"{at:02}.ckpt", weights_only=True)
    del checkpoint["callbacks"]["AccumulationSchedule"]
    torch.save(checkpoint, path)
    how: dict[str, Any] = {"loader": Resumable(), "resume": path, "max_epochs": TWO}
    again, _ = fitted("mixin", schedule(EVERY_STEP), **how)
    return off(again, reference(EVERY_STEP, epochs=TWO)[0])


@pytest.mark.parametrize("at", [2, 5, 6, 12])
@pytest.mark.filterwarnings("ignore:accumulation. an open window")
def test_resumed_inside_a_window_without_the_state_of_the_schedule_deviates(
    kept: Path, tmp_path: Path, at: int
) -> None:
    """Negative control: where the open window began is not in the batch's number."""
    assert resumed_without_its_state(kept, tmp_path, at) > NAIVE


@pytest.mark.parametrize("at", [0, 3, 8, 9, 14])
def test_resumed_at_an_edge_without_the_state_equals_uninterrupted(
    kept: Path, tmp_path: Path, at: int
) -> None:
    assert resumed_without_its_state(kept, tmp_path, at) <= EXACT


class Validated(Manual):
    """With a validation, which saves."""

    def __init__(self, *, automatic: bool) -> None:
        super().__init__(optimizer="adamw")
        self.automatic_optimization = automatic
        self.automatic = automatic

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if not self.automatic:
            return super().training_step(batch, batch_idx)
        return plain_token_loss(self.net, batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        plain_token_loss(self.net, batch)


@pytest.mark.parametrize(
    ("plan", "interval", "automatic"),
    [
        ("up and down in mid-epoch", 1, True),
        ("up and down in mid-epoch", 3, False),
        ("by tokens", 3, True),
        ("by tokens", 1, False),
    ],
)
def test_resumed_from_validation_equals_uninterrupted(
    tmp_path: Path, plan: str, interval: int, automatic: bool
) -> None:
    """A validation inside a window leaves its gradients alone, also in manual
    optimization."""
    end, _ = reference(plan, epochs=TWO)

    def run(*callbacks: Any, resume: Any = None) -> float:
        module = Validated(automatic=automatic)
        module.val_dataloader = lambda: micro_batches(SEQUENCES, [4])
        fitted(
            "mixin",
            schedule(plan),
            *callbacks,
            module=module,
            loader=Resumable(),
            resume=resume,
            val_check_interval=interval,
            num_sanity_val_steps=0,
            max_epochs=TWO,
        )
        return off(module, end)

    assert run(Keeping(tmp_path, "on_validation_end")) <= EXACT
    for path in sorted(tmp_path.glob("*.ckpt"))[automatic :: 5 - interval]:
        assert run(resume=path) <= EXACT, path.name


# ---- an edited plan ------------------------------------------------------------------

EDITED = {0: 1, 4: 3, 5: 2}


def edited_windows(old: dict[int, int], at: int, *, unit: str) -> list[list[range]]:
    """By the old plan until a batch is over and its window full, then by the new."""
    before = windows_of_plan(old, unit, token_counts())
    counts = token_counts()
    made: list[list[range]] = []
    weighed: list[int] = []
    for epoch in range(EPOCHS):
        made.append([])
        first = 0
        while first < len(counts):
            if 10 * epoch + first <= at:
                window = next(w for w in before[epoch] if w.start == first)
            else:
                begun = {"epoch": epoch, "step": len(weighed), "tokens": 0}
                begun["tokens"] = sum(weighed[:-1])
                start = max(s for s in EDITED if s <= begun[unit])
                window = range(first, min(first + EDITED[start], len(counts)))
            made[-1].append(window)
            weighed.append(sum(counts[i] for i in window))
            first = window.stop
    return made


@pytest.mark.parametrize(
    ("at", "front", "unit"),
    [*zip(range(0, 20, 3), cycle(FRONTS), cycle(["step", "epoch"]))],
)
def test_resumed_with_an_edited_plan_finishes_the_open_window(
    tmp_path: Path, unit: Any, at: int, front: str
) -> None:
    """speculators#859, transformers#43708: the first window after a resume is not cut
    short; the new plan holds from the next on, within the same epoch."""
    path = tmp_path / "old.ckpt"
    old = {0: 4, 1: 5, 3: 3}
    ours = AccumulationSchedule(old, unit=unit)
    fitted(front, ours, Saving(path, at), loader=Resumable())
    new = AccumulationSchedule(EDITED, unit=unit)
    module, fit = fitted(front, new, loader=Resumable(), resume=path)
    windows = edited_windows(old, at, unit=unit)
    assert fit.global_step == sum(map(len, windows))
    assert off(module, big_batch_over(windows)) <= EXACT


def test_resumed_without_a_schedule_is_exact_between_epochs(tmp_path: Path) -> None:
    """The schedule was taken out: the Trainer's own number holds again."""
    path = tmp_path / "old.ckpt"
    ours = AccumulationSchedule({0: 4, 1: 2})
    saving = Saving(path, 9)
    fitted("mixin", ours, saving, loader=Resumable())
    windows = windows_of_plan({0: 4, 1: 1}, "epoch", token_counts())
    with pytest.warns(
        UserWarning, match="Please add the following callbacks: ..AccumulationSchedule"
    ):
        module, _ = fitted("mixin", loader=Resumable(), resume=path)
    assert off(module, big_batch_over(windows)) <= EXACT


def test_schedule_added_to_a_checkpoint_begins_at_its_step(tmp_path: Path) -> None:
    path = tmp_path / "old.ckpt"
    fitted("mixin", Saving(path, 9), loader=Resumable(), accumulate=2)
    ours = AccumulationSchedule({0: 2, 7: 5}, unit="step")
    module, _ = fitted("mixin", ours, loader=Resumable(), resume=path)
    windows = windows_of_plan({0: 2, 7: 5}, "step", token_counts())
    assert off(module, big_batch_over(windows)) <= EXACT


@pytest.mark.parametrize(
    ("size", "front"), [(3, "mixin"), (5, "callback"), (3, "manual")]
)
def test_schedule_added_in_mid_epoch_begins_with_a_whole_window(
    tmp_path: Path, size: int, front: str
) -> None:
    """At the edge of a window of four. By the batch's number alone, the next window
    would end at batch 6 (or 5), where it has one micro-batch or two."""
    path = tmp_path / "old.ckpt"
    fitted(front, Saving(path, 3), loader=Resumable(), accumulate=4)
    ours, watch = AccumulationSchedule({0: size}), Watch()
    module, _ = fitted(front, ours, watch, loader=Resumable(), resume=path)
    windows = windows_of_plan({0: size}, "epoch", token_counts())
    first = [range(4), range(4, 4 + size), range(4 + size, 10)]
    assert watch.stepped[:2] == [size - 1, 5]
    assert off(module, big_batch_over([first, *windows[1:]])) <= EXACT
    assert off(module, big_batch_over(windows)) > NAIVE


def test_plans_that_are_resumed_change_in_mid_epoch() -> None:
    """Else this page proves less than it says."""
    for plan in RESUMED:
        windows = windows_of_plan(*PLANS[plan], token_counts(), epochs=TWO)
        assert any(len({len(w) for w in ws[:-1]}) > 1 for ws in windows)


# Windows of 4, 4 and 2; the first of them has so many tokens.
CHANGES_AT = sum(token_counts()[:4])


def test_a_plan_by_tokens_resumes_a_plan_by_steps_exactly(tmp_path: Path) -> None:
    """Tokens are counted by whatever plan; counted from the checkpoint on, as the
    control counts them, the window of epoch 0 that is next would have another size."""
    path = tmp_path / "old.ckpt"
    by_steps = AccumulationSchedule({0: 4}, unit="step")
    fitted("mixin", by_steps, Saving(path, 5), loader=Resumable())
    by_tokens = AccumulationSchedule({0: 4, CHANGES_AT: 1}, unit="tokens")
    module, _ = fitted("mixin", by_tokens, loader=Resumable(), resume=path)
    first = [range(4), range(4, 8), range(8, 9), range(9, 10)]
    rest = [[range(i, i + 1) for i in range(10)]] * (EPOCHS - 1)
    assert off(module, big_batch_over([first, *rest])) <= EXACT
    control = [range(4), range(4, 8), range(8, 10)]
    assert off(module, big_batch_over([control, *rest])) > NAIVE


@pytest.mark.parametrize("at", [5, 7, 12])
def test_an_older_checkpoint_of_a_plan_by_tokens_resumes(
    tmp_path: Path, at: int
) -> None:
    """The schedule's own state held the count."""
    path, plan = tmp_path / "old.ckpt", "by tokens"
    fitted("mixin", schedule(plan), Saving(path, at), loader=Resumable())
    checkpoint = torch.load(path, weights_only=True)
    (account,) = checkpoint["trainkit"].pop("ledger").values()
    checkpoint["callbacks"]["AccumulationSchedule"]["tokens"] = account["sums"][0]
    torch.save(checkpoint, path)
    again, _ = fitted("mixin", schedule(plan), loader=Resumable(), resume=path)
    assert off(again, reference(plan)[0]) <= EXACT


def test_tokens_that_nobody_counted_are_announced(tmp_path: Path) -> None:
    """A checkpoint of plain Lightning holds no count; the plan starts at 0."""
    path = tmp_path / "old.ckpt"
    plain = trainer(2, callbacks=[Saving(path, 9)], max_epochs=1)
    plain.fit(Plain(optimizer="adamw"), Resumable())
    by_tokens = AccumulationSchedule({0: 2, 50: 4}, unit="tokens")
    with pytest.warns(UserWarning, match="holds no count of tokens, so they are"):
        fitted("mixin", by_tokens, loader=Resumable(), resume=path)
