"""A checkpoint taken inside a window on several ranks, resumed on as many or on one;
and what is saved for each rank."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from shutil import copy
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy
import pytest
import torch
from torch import Tensor

from tests.helpers import (
    NAIVE,
    TOLERANCE,
    pad,
    ragged_sequences,
    raise_rank_errors,
    run_cases,
    run_ranks,
)
from tests.lit.resume.interrupting import (
    KillAt,
    ask,
    close,
    differing,
    interrupted,
    rows,
    unlike,
)
from tests.lit.resume.interrupting import train as train_one
from tests.lit.resume.resuming import strip
from tests.lit.windows.rank_cases import Apart, deviations, fit
from tests.zoo.modules import Manual, Plain, Sharded, whole
from trainkit.core.generators import read_states, write_states
from trainkit.lit.resume.per_rank import EpochSums, RandomState

pytestmark = pytest.mark.usefixtures("quiet")
EXACT = TOLERANCE[torch.float64]
DATA = ragged_sequences(32)
WINDOW, NUM_BATCHES = 4, 8
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


KINDS: dict[str, dict[str, Any]] = {
    "automatic": {"front": "callback", "kind": Plain},
    "manual": {"front": "plain", "kind": Manual},
    "manual, apart": {"front": "plain", "kind": Apart},
    "sharded": {"front": "callback", "kind": Sharded, "split": 1},
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


def train(rank: int, world: int, folder: Path, name: str, case: Case) -> Tensor:
    """The weights that a training of one epoch ended with."""
    resume, save, skip = case
    path = folder / f"{resume}.ckpt"
    if name == "stripped":
        path = folder / "stripped.ckpt"
        if rank == 0:
            strip(Path(copy(folder / f"{resume}.ckpt", path)))
        torch.distributed.barrier()
    how = KINDS.get(name.partition(": ")[0], KINDS["automatic"])
    fitted = fit(
        rank,
        world,
        how["front"],
        how["kind"],
        *([Save(str(folder / f"{name}.ckpt"), **save)] if save else []),
        data=FromBatch(rank, world, skip),
        made={"optimizer": "adamw"},
        window=WINDOW,
        max_epochs=1,
        split=how.get("split"),
        ckpt_path=str(path) if resume else None,
    )
    return whole(fitted.lightning_module)


def off(world: int, folder: Path, cases: dict[str, Case]) -> dict[str, float]:
    """How far the worst rank is from the big batch."""
    all_cases = {name: (train, folder, name, case) for name, case in cases.items()}
    of: dict[str, Any] = {"of": (2, WINDOW), "epochs": 1, "replicas": 2}
    return {
        name: max(deviations(ends, DATA, "adamw", **of))
        for name, ends in run_cases(world, all_cases).items()
    }


def test_resume_inside_a_window_of_two_ranks_equals_the_big_batch(
    tmp_path: Path,
) -> None:
    """transformers#22143: the pending gradients were gone. On two ranks or on one,
    saved once or twice in the window, by manual optimization and sharded too."""
    on_two = off(2, tmp_path, SAVED | RESUMED | AGAIN)
    on_one = off(1, tmp_path, RESUMED)
    assert on_two.pop("stripped") > NAIVE
    for found in (on_two, on_one):
        assert {name: far for name, far in found.items() if far > EXACT} == {}


# ---- random numbers and sums of an epoch, saved for each rank ------------------------

CPU = torch.device("cpu")


def draw() -> list[Any]:
    return [random.random(), random.gauss(0, 1), numpy.random.rand(), torch.rand(2)]


def test_states_go_through_a_file_that_nobody_must_trust(tmp_path: Path) -> None:
    random.gauss(0, 1)  # leaves a second one behind
    numpy.random.randn()
    torch.save(read_states(CPU), tmp_path / "states")
    expected = draw()
    write_states(torch.load(tmp_path / "states", weights_only=True), CPU)
    assert differing(expected, draw()) == []
    assert differing(expected, draw()) != []


def test_a_rank_that_was_not_there_is_spoken_of() -> None:
    """A checkpoint without states changes nothing."""
    each, module, before = RandomState(), SimpleNamespace(device=CPU), read_states(CPU)
    none = SimpleNamespace(flattened=[])
    loop = SimpleNamespace(restarting=False, _combined_loader=none)
    fit: Any = {"state": SimpleNamespace(fn="fit"), "fit_loop": loop}
    trainer = SimpleNamespace(global_rank=1, **fit)
    for states in ([], [before]):
        each.on_load_checkpoint(
            trainer, None, {RandomState.KEY: states} if states else {}
        )
        if states:
            with pytest.warns(UserWarning, match="of 1 ranks, but not of rank 1"):
                each.on_train_start(trainer, module)
        else:
            each.on_train_start(trainer, module)
        assert differing(before, read_states(CPU)) == []


def test_sums_that_cannot_go_on_are_spoken_of(monkeypatch: Any) -> None:
    each, trainer = EpochSums(), SimpleNamespace()
    monkeypatch.setattr(
        "trainkit.lit.resume.per_rank.add_callback_metrics", lambda *args: None
    )
    monkeypatch.setattr("trainkit.lit.resume._compat.epoch_sums", lambda trainer: {})
    one = {"value": torch.tensor(1.0)}
    each._before = {"training_step.accuracy": [None], "training_step.x": [one]}
    with pytest.warns(UserWarning, match="metric objects of training_step.accuracy"):
        each.on_train_start(trainer, None)
    with pytest.warns(UserWarning, match="training_step.x was logged before the run"):
        each.on_train_epoch_end(trainer, None)


def test_sums_of_ranks_that_are_no_more_are_added(tmp_path: Path) -> None:
    """As if another rank had logged what this one had."""
    ends: list[tuple[float, float, float]] = []
    for number in (1, 2):
        folder = tmp_path / str(number)
        with pytest.raises(SystemExit):
            train_one(folder, kill=ask("on_train_batch_end", 5))
        path = folder / "checkpoints" / "last.ckpt"
        checkpoint = torch.load(path, weights_only=True)
        (sums,) = checkpoint[EpochSums.KEY][0]["sums"]["training_step.train/mean"]
        checkpoint[EpochSums.KEY] *= number
        torch.save(checkpoint, path)
        train_one(folder, resume=True)
        means = [row["train/mean"] for row in rows(folder) if row.get("train/mean")]
        ends.append((float(means[0]), float(sums["value"]), float(sums["weight"])))
    (one, value, weight), (two, *_) = ends
    assert two == pytest.approx((one * 26 + value) / (26 + weight), rel=1e-6)
    assert two != pytest.approx(one, rel=1e-4)


def on_rank(rank: int, world_size: int, folder: str) -> Any:
    ddp: dict[str, Any] = {"strategy": "ddp", "devices": world_size}
    how = {**ddp, "limit_val_batches": 0, "seed": 7 + rank}  # each draws others
    path = Path(folder)
    whole = train_one(path / "whole", **how)
    found = interrupted(path / "killed", KillAt("on_train_batch_start", 4), **how)
    folders = path / "whole", path / "killed"
    return unlike(whole, found), [] if rank else close(*map(rows, folders))


@pytest.mark.slow
def test_ranks_go_on_exactly(tmp_path: Path) -> None:
    found = raise_rank_errors(run_ranks(on_rank, 2, str(tmp_path)))
    assert found == [([], []), ([], [])]
