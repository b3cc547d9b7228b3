"""A checkpoint taken inside a window, or a micro-batch, and resumed; on ranks too."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from shutil import copy
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    ModelCheckpoint,
    OnExceptionCheckpoint,
    model_checkpoint,
)
from torch import Tensor

from tests.helpers import (
    NAIVE,
    TOLERANCE,
    deviation,
    pad,
    ragged_sequences,
    run_cases,
    trainer,
)
from tests.lit.fronts import WINDOW, micro_batches, windows_of
from tests.lit.resume.resuming import (
    ENDS,
    SEQUENCES,
    START,
    Resumable,
    Saving,
    holds,
    off,
    strip,
    train,
)
from tests.lit.split.common import failing
from tests.lit.windows.rank_cases import Apart, deviations, fit
from tests.zoo.modules import Manual, Plain, Sharded, hooked, plain_token_loss, whole
from trainkit import AccumulationCallback, MicroBatching, PerToken
from trainkit.lit.resume.per_rank import PerRank

pytestmark = pytest.mark.usefixtures("quiet")

CUT = MicroBatching(size=2)
OTHER, FEW = MicroBatching(tokens=24), MicroBatching(tokens=48, shapes=3)


def looks(self: Plain, batch: Any, batch_idx: int) -> None:
    """A step without a gradient."""
    plain_token_loss(self.net, batch)


# ---- between micro-batches -----------------------------------------------------------


@pytest.mark.parametrize(
    ("front", "cut", "window", "places"),
    [
        # After every kind of batch of two epochs, which the fronts share out.
        ("mixin", None, WINDOW, [(at, None) for at in (0, 2, 4, 8, 10, 18)]),
        ("callback", None, WINDOW, [(at, None) for at in (1, 3, 6, 9, 12)]),
        # Also with another cut, or without one.
        ("mixin", CUT, 1, [(0, CUT), (4, OTHER), (4, None), (9, None), (12, CUT)]),
        ("mixin", CUT, 2, [(4, CUT), (5, CUT), (5, FEW)]),
        ("mixin", CUT, WINDOW, [(4, CUT), (5, CUT), (6, CUT)]),
    ],
)
def test_resumed_in_mid_epoch_equals_uninterrupted(
    tmp_path: Path, front: str, cut: Any, window: int, places: list[tuple[int, Any]]
) -> None:
    """transformers#22143, with AdamW. The control: one loader batch is left out."""
    paths = {at: tmp_path / f"{at}.ckpt" for at, _ in places}
    how: dict[str, Any] = {"front": front, "window": window}
    saving = [Saving(path, at) for at, path in paths.items()]
    ended = train(*saving, cut=cut, **how).lightning_module
    assert deviation(ended, ENDS[window], START) <= 1e-10
    for at, other in places:
        assert off(path=paths[at], cut=other, **how) <= 1e-10, at
    if window == 1:  # a checkpoint knows of no cut then
        assert not any("windows" in holds(path) for path in paths.values())
        assert off(path=paths[4], cut=cut, replay=-1, **how) > NAIVE


@pytest.mark.parametrize("at", [3, 5, 9])
def test_without_its_state_a_window_is_off_and_said(tmp_path: Path, at: int) -> None:
    """Negative control: the checkpoint as plain Lightning would have written it. Of one
    between windows nothing is missing."""
    path, lost = tmp_path / "one.ckpt", (at + 1) % WINDOW
    module = train(Saving(path, at)).lightning_module
    state = holds(path)
    if at != 5:
        assert set(state) == {"num_windows", "ledger"}
        assert off(path=strip(path)) <= 1e-10
        return
    assert set(state["gradients"]) == {name for name, _ in module.named_parameters()}
    assert float(state["windows"][0]["totals"]["weight"]) == float(
        sum((b["labels"] != -100).sum() for b in Resumable().batches[4:6])
    )
    with pytest.warns(UserWarning, match=f"does not hold the {lost} micro-batches"):
        assert off(path=strip(path)) > NAIVE


class Clock:
    """Each look at it is a second later."""

    def __init__(self) -> None:
        self.now = 0

    def monotonic(self) -> int:
        self.now += 1
        return self.now


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning")
@pytest.mark.parametrize(
    ("when", "inside", "how"),
    [
        ({"every_n_train_steps": 1}, False, {}),
        ({"train_time_interval": timedelta(seconds=6)}, True, {}),
        ({"every_n_train_steps": 3}, False, {"window": 1, "cut": CUT}),
    ],
)
def test_resumed_from_model_checkpoint_equals_uninterrupted(
    tmp_path: Path, monkeypatch: Any, when: Any, inside: bool, how: dict[str, Any]
) -> None:
    """pytorch-lightning#17903: by steps it saves after windows, by time anywhere."""
    monkeypatch.setattr(model_checkpoint, "time", Clock())
    saver = ModelCheckpoint(tmp_path, save_top_k=-1, **when)
    train(saver, enable_checkpointing=True, **how)
    files = sorted(tmp_path.glob("*.ckpt"))
    assert len(files) > 1
    assert any("windows" in holds(path) for path in files) == inside
    for path in files[1::2]:
        assert off(path=path, **how) <= 1e-10


@pytest.mark.parametrize("interval", [1, 3])
def test_resumed_from_validation_inside_a_window_equals_uninterrupted(
    tmp_path: Path, interval: int
) -> None:
    """The validation's own hooks save, where many keep the best model."""
    path = tmp_path / "validation.ckpt"
    how: dict[str, Any] = {"val_check_interval": interval, "num_sanity_val_steps": 0}
    how |= {"kind": hooked(Plain, validation_step=looks)}
    how |= {"validation": micro_batches(SEQUENCES, [4])}
    ended = train(Saving(path, 5, "on_validation_end"), **how).lightning_module
    assert deviation(ended, ENDS[WINDOW], START) <= 1e-10
    assert off(path=path, **how) <= 1e-10


def test_saved_twice_in_one_window_equals_uninterrupted(tmp_path: Path) -> None:
    """The second checkpoint holds what the first one had carried over."""
    first, second = tmp_path / "first.ckpt", tmp_path / "second.ckpt"
    train(Saving(first, 4))
    train(Saving(second, 6), path=first)
    assert int(holds(second)["windows"][0]["totals"]["count"]) == 3
    assert off(path=second) <= 1e-10


def test_what_a_checkpoint_carries_into_another_fit(tmp_path: Path) -> None:
    """With another window length (speculators#859, pytorch-lightning#8493) Lightning
    zeroes at once, and the carried micro-batches are counted. What was loaded to be
    tested is not resumed."""
    path = tmp_path / "inside.ckpt"
    train(Saving(path, 5))
    with pytest.warns(UserWarning, match="an open window of 2 micro-batches"):
        shorter = train(path=path, window=3, max_epochs=1)
    window = windows_of(shorter).last_window
    assert window is not None
    assert int(window.num_micro_batches) == 1
    examined = hooked(Plain, test_step=looks)
    fitted = trainer(WINDOW, callbacks=[AccumulationCallback(PerToken())])
    fitted.test(examined(), Resumable(), ckpt_path=path, verbose=False)
    fitted.fit(module := examined(optimizer="adamw"), Resumable())
    assert deviation(module, ENDS[WINDOW], START) <= 1e-10


# ---- while a micro-batch is under way, or has failed ---------------------------------


@pytest.mark.filterwarnings("ignore:`.fit.ckpt_path=None.` was called:UserWarning")
@pytest.mark.filterwarnings('ignore:.fit.ckpt_path="last". is set, but:UserWarning')
@pytest.mark.parametrize(
    ("cut", "window", "at"),
    [
        *[(None, WINDOW, at) for at in (1, 4, 7)],
        *[(CUT, 1, at) for at in (1, 2, 3, 15)],  # anywhere in a loader batch
    ],
)
def test_resumed_from_on_exception_checkpoint_equals_uninterrupted(
    tmp_path: Path, cut: Any, window: int, at: int
) -> None:
    """A forward pass fails, as an out-of-memory would."""
    module = failing(at, MemoryError())(cut=cut, optimizer="adamw")
    saver = OnExceptionCheckpoint(tmp_path)
    fitted = trainer(window, callbacks=[saver], enable_checkpointing=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "accumulation: an open window")
        with pytest.raises(MemoryError):
            fitted.fit(module, Resumable())
    path = tmp_path / "on_exception.ckpt"
    assert off(path=path, cut=cut, window=window, replay=1) <= 1e-10


@pytest.mark.parametrize(
    ("hook", "at"), [("on_after_backward", 5), ("on_before_optimizer_step", 9)]
)
def test_saved_while_a_micro_batch_is_under_way_is_said_twice(
    tmp_path: Path, hook: str, at: int
) -> None:
    """Torn: the resumed run repeats that micro-batch. Said when saved and resumed."""
    path, lost = tmp_path / "torn.ckpt", at % WINDOW
    text = f"first {lost} micro-batches are not in it: a micro-batch is under way"
    with pytest.warns(UserWarning, match=text):
        train(Saving(path, at, hook))
    with pytest.warns(UserWarning, match=f"does not hold the {lost} micro-batches"):
        train(path=path, replay=1)


@pytest.mark.parametrize(
    ("hook", "at", "window", "cut"),
    [
        *[("on_after_backward", 5, 1, cut) for cut in (None, CUT)],
        *[("on_before_optimizer_step", 5, 1, cut) for cut in (None, CUT)],
        # All loader batches of a split window are there.
        ("on_after_backward", 9, WINDOW, CUT),
        ("on_before_optimizer_step", 3, WINDOW, CUT),
        ("", 6, WINDOW, None),
    ],
)
def test_saved_where_nothing_is_torn_equals_uninterrupted(
    tmp_path: Path, hook: str, at: int, window: int, cut: Any
) -> None:
    """The resumed run repeats all there was of a window of one. Before its backward
    pass, inside `training_step`, a window is whole up to the batch before."""
    path = tmp_path / "one.ckpt"
    saving = Saving(path, at, hook or "unused")

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        if not hook:
            saving.save(self.trainer)
        return self.loss_of(batch)

    kind = hooked(Plain, training_step=training_step)
    train(saving, kind=kind, window=window, cut=cut)
    assert off(path=path, window=window, cut=cut, replay=1) <= 1e-10


def logging(self: Any, batch: Any, batch_idx: int) -> Tensor:
    loss = self.loss_of(batch)
    self.log("loss", loss, on_step=False, on_epoch=True)
    self.log_exact("exact", loss, batch)
    return loss


def test_means_of_a_resumed_epoch_are_those_of_the_whole_epoch(tmp_path: Path) -> None:
    """With `PerRank`, of loader batches that are cut; also where a callback before it
    saves the resumed run at once."""
    path, second = tmp_path / "mid.ckpt", tmp_path / "second.ckpt"
    how: dict[str, Any] = {"kind": hooked(Plain, training_step=logging), "cut": CUT}
    how |= {"window": 1, "max_epochs": 1}
    whole = train(PerRank(), Saving(path, 4), **how)
    train(Saving(second, 5), PerRank(), path=path, **how)
    again = train(PerRank(), path=second, **how)
    expected = {k: float(v) for k, v in whole.callback_metrics.items()}
    found = {k: float(v) for k, v in again.callback_metrics.items()}
    assert found == pytest.approx(expected)
    assert set(found) == {"loss", "exact"}


# ---- on several ranks, resumed on as many or on one ----------------------------------


EXACT = TOLERANCE[torch.float64]
DATA = ragged_sequences(32)
NUM_BATCHES = 8
INSIDE = 6  # one window is over, and two micro-batches of the next have run


class FromBatch:
    """A rank's share of an epoch of eight batches, without those already seen."""

    def __init__(self, rank: int, world: int, skip: int) -> None:
        # On one rank the windows are those of two: their shares interleave.
        share, size = DATA[rank::world], len(DATA) // max(world, 1) // NUM_BATCHES
        self.batches = [share[i : i + size] for i in range(0, len(share), size)]
        self.skip = skip

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return map(pad, self.batches[self.skip :])


class Save(pl.Callback):
    """Every rank saves before or after a batch."""

    def __init__(self, path: str, *, before: int = -1, after: int = -1) -> None:
        self.path, self.before, self.after = path, before, after

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == self.before:
            trainer.save_checkpoint(self.path)

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        if args[-1] + 1 == self.after:
            trainer.save_checkpoint(self.path)


# How gradients are divided, the module, and its ranks of FSDP.
KINDS: dict[str, tuple[str, Any, int | None]] = {
    "automatic": ("callback", Plain, None),
    "manual": ("plain", Manual, None),
    "manual, apart": ("plain", Apart, None),
    "sharded": ("callback", Sharded, 1),
}
Case = tuple[str, dict[str, int] | None, int]
"""The training from which it resumes, when it saves, and the batches already seen."""
SAVED: dict[str, Case] = {f"{k}: saved": ("", {"after": INSIDE}, 0) for k in KINDS}
RESUMED: dict[str, Case] = {
    f"{kind}: resumed": (f"{kind}: saved", None, INSIDE) for kind in KINDS
}
AGAIN: dict[str, Case] = {
    # A second checkpoint inside the same window, of a run that resumed from the first.
    "saved at once": ("automatic: saved", {"before": INSIDE}, INSIDE),
    "resumed at once": ("saved at once", None, INSIDE),
    "saved later": ("automatic: saved", {"after": INSIDE + 1}, INSIDE),
    "resumed later": ("saved later", None, INSIDE + 1),
    "stripped": ("automatic: saved", None, INSIDE),
}


def train_on_ranks(
    rank: int, world: int, folder: Path, name: str, case: Case
) -> Tensor:
    """The weights that a training of one epoch ended with."""
    resume, save, skip = case
    path = folder / f"{resume}.ckpt"
    if name == "stripped":
        path = folder / "stripped.ckpt"
        if rank == 0:
            strip(Path(copy(folder / f"{resume}.ckpt", path)))
        torch.distributed.barrier()
    front, kind, split = KINDS.get(name.partition(": ")[0], KINDS["automatic"])
    saves = [Save(str(folder / f"{name}.ckpt"), **save)] if save else []
    how: dict[str, Any] = {"window": WINDOW, "max_epochs": 1, "split": split}
    how |= {"data": FromBatch(rank, world, skip), "made": {"optimizer": "adamw"}}
    how |= {"ckpt_path": str(path) if resume else None}
    return whole(fit(rank, world, front, kind, *saves, **how).lightning_module)


def off_on(world: int, folder: Path, cases: dict[str, Case]) -> dict[str, float]:
    """How far the worst rank is from the big batch."""
    all_cases = {
        name: (train_on_ranks, folder, name, case) for name, case in cases.items()
    }
    of: dict[str, Any] = {"of": (2, WINDOW), "epochs": 1, "replicas": 2}
    return {
        name: max(deviations(ends, DATA, "adamw", **of))
        for name, ends in run_cases(world, all_cases).items()
    }


def test_resume_in_a_window_of_two_ranks_equals_the_big_batch(tmp_path: Path) -> None:
    """transformers#22143: the pending gradients were gone. On two ranks or on one,
    saved once or twice in the window, by manual optimization and sharded too."""
    on_two = off_on(2, tmp_path, SAVED | RESUMED | AGAIN)
    on_one = off_on(1, tmp_path, RESUMED)
    assert on_two.pop("stripped") > NAIVE
    for found in (on_two, on_one):
        assert {name: far for name, far in found.items() if far > EXACT} == {}
