"""A run that is interrupted anywhere and goes on ends as one that was not."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
import warnings
from itertools import cycle
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.helpers import pad, quiet_lightning
from tests.lit.resume.interrupting import (
    TRAIN,
    Counting,
    Dropping,
    KillAt,
    Killed,
    ask,
    close,
    differing,
    interrupted,
    rows,
    state_of,
    train,
    unlike,
)
from trainkit import (
    AccumulationCallback,
    BatchNormGuard,
    MetricsCSVLogger,
    MicroBatching,
    PerToken,
)
from trainkit.lit.front import exact_resume
from trainkit.lit.resume import _compat, per_rank

pytestmark = [
    pytest.mark.usefixtures("quiet"),
    # A killed process says nothing; in ours Lightning still tells the callbacks.
    pytest.mark.filterwarnings("ignore:accumulation. an open window:UserWarning"),
    # Killed before its first checkpoint, a run begins again.
    pytest.mark.filterwarnings("ignore:.*held the rows of another:UserWarning"),
]

IN_BATCHES = [
    "on_train_batch_start",
    "on_before_backward",
    "on_after_backward",
    "on_train_batch_end",
    "on_before_zero_grad",
    "on_before_optimizer_step",
    "on_save_checkpoint",
]
ELSEWHERE = {
    "on_validation_start": (3,),
    "on_validation_batch_end": (10, 10),
    "on_validation_end": (3,),
    "on_train_epoch_start": (-1, 6),
    "on_train_epoch_end": (6, 13),
    "on_train_end": (13,),
}
WAYS = ("killed first", signal.SIGTERM, "killed last", signal.SIGINT)
"""Killed before all other callbacks or after them, or asked to stop; by turns."""


def moments() -> Any:
    """Every hook at some batches, which differ from hook to hook: together they are
    all of two epochs of seven batches, in windows of 3, 3 and 1, with a validation
    after every fourth."""
    places = {hook: (n, n + 7) for n, hook in enumerate(IN_BATCHES)}
    each = [(hook, at) for hook, ats in {**places, **ELSEWHERE}.items() for at in ats]
    return [(*moment, way) for moment, way in zip(each, cycle(WAYS), strict=False)]


@pytest.fixture(scope="module")
def whole_folder(tmp_path_factory: Any) -> Path:
    return tmp_path_factory.mktemp("whole")


@pytest.fixture(scope="module")
def whole(whole_folder: Path) -> Any:
    """The state and the rows of the run that nobody interrupted."""
    with quiet_lightning():
        return state_of(*train(whole_folder)), rows(whole_folder)


@pytest.mark.parametrize(("hook", "batch", "way"), moments())
def test_interrupted_run_goes_on_exactly(
    whole: Any, tmp_path: Path, hook: str, batch: int, way: Any
) -> None:
    state, all_rows = whole
    if isinstance(way, str):
        kill, is_last = KillAt(hook, batch), way == "killed last"
        found = interrupted(tmp_path, kill, last=is_last, every=1 + batch % 3)
        assert differing(all_rows, rows(tmp_path)) == []
    else:
        found = interrupted(tmp_path, ask(hook, batch, way), every=100)
        assert close(all_rows, rows(tmp_path)) == []
    assert differing(state, state_of(*found)) == []


class Inner(Dropping):
    """Drops within chunks of rows, too."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        net: Any = self.net
        net.head = nn.Sequential(nn.Dropout(0.3), net.head)


class Normalises(nn.Sequential):
    """A layer before which the values of all tokens are normalised."""

    def forward(self, input: Tensor) -> Tensor:
        return self[1](self[0](input.transpose(1, 2)).transpose(1, 2))


class Normed(Dropping):
    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        net: Any = self.net
        norm = nn.BatchNorm1d(net.head.in_features, dtype=torch.float64)
        net.head = Normalises(norm, net.head)


def ours(kind: Any, *callbacks: Any) -> dict[str, Any]:
    """Options of a module whose windows are single loader batches."""
    options = {"kind": kind, "others": callbacks, "accumulate_grad_batches": 1}
    return {**options, "without": ["AccumulationCallback", "WindowMonitor"]}


HEAD = MicroBatching(size=2, inside="net.head")
TAPED = AccumulationCallback(PerToken(), micro_batching=HEAD, proof="off")
OTHER_WAYS: list[dict[str, Any]] = [
    {"scheduler": "plateau", "accumulate_grad_batches": 1},
    {"scheduler": "plateau by step", "limit_val_batches": 0},
    {"scheduler": "epoch", "accumulate_grad_batches": 7},
    {"max_steps": 5, "max_epochs": -1, "gradient_clip_val": 0.1},
    {"check_val_every_n_epoch": None, "log_every_n_steps": 3},
    {"num_workers": 2, "val_check_interval": 1.0},
    ours(Counting),
    ours(Inner, AccumulationCallback(micro_batching=HEAD)),
    ours(Normed, TAPED, BatchNormGuard("exact")),
]


@pytest.mark.parametrize(
    ("how", "batches"),
    [*zip(OTHER_WAYS, cycle([(8, 12), (2, 9), (7, 11), (1, 5), (4, 6)]))],
    ids=["-".join(str(value)[:20] for value in how.values()) for how in OTHER_WAYS],
)
def test_trained_in_other_ways(
    tmp_path: Path, how: dict[str, Any], batches: tuple[int, int]
) -> None:
    """Killed, then asked to stop."""
    whole, hook = train(tmp_path / "whole", **how), "on_train_batch_start"
    kills = KillAt(hook, batches[0]), ask(hook, batches[1])
    found = interrupted(tmp_path, *kills, **how)
    assert unlike(whole, found) == []
    assert close(rows(tmp_path / "whole"), rows(tmp_path)) == []


def test_interrupted_again_and_again(whole: Any, tmp_path: Path) -> None:
    """Each run begins with the proof, as a user's does."""
    kills = [KillAt("on_train_batch_end", at) for at in (1, 2, 4, 6, 7, 9, 13)]
    found = interrupted(tmp_path, *kills, proof="warn")
    assert differing(whole, (state_of(*found), rows(tmp_path))) == []


@pytest.mark.parametrize("nth", [1, 3])
def test_killed_while_a_checkpoint_is_written(
    whole: Any, tmp_path: Path, monkeypatch: Any, nth: int
) -> None:
    """Half of it is in the file when it dies: the one before stands."""
    calls, move = iter(range(1, 99)), os.replace

    def die_at(source: Any, target: Any) -> None:
        if str(target).endswith("last.ckpt") and next(calls) == nth:
            content = Path(source).read_bytes()
            Path(source).write_bytes(content[: len(content) // 2])
            raise Killed
        move(source, target)

    monkeypatch.setattr(os, "replace", die_at)
    with pytest.raises(Killed):
        train(tmp_path)
    monkeypatch.undo()
    assert (tmp_path / "checkpoints" / "last.ckpt").exists() == (nth > 1)
    found = train(tmp_path, resume=True)
    assert differing(whole, (state_of(*found), rows(tmp_path))) == []


def test_late_log_of_the_module_is_lost_only_in_the_very_moment(tmp_path: Path) -> None:
    train(tmp_path / "whole", logs_late=True)
    all_rows = rows(tmp_path / "whole")
    interrupted(tmp_path / "a", KillAt("on_train_batch_start", 6), logs_late=True)
    assert differing(all_rows, rows(tmp_path / "a")) == []
    kill = KillAt("on_train_batch_end", 5)  # after the checkpoint, before the row
    interrupted(tmp_path / "b", kill, last=True, logs_late=True)
    assert differing(all_rows, rows(tmp_path / "b")) == [".1: ['train/late']"]


# ---- what it takes: negative controls ------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*your dataloader is not resumable")
@pytest.mark.filterwarnings("ignore:ExactResume. the train_dataloader starts again")
@pytest.mark.filterwarnings("ignore:checkpoint. it was taken inside a window")
@pytest.mark.parametrize("lacks", ["random numbers", "sums", "loader"])
def test_without_one_of_its_parts_a_run_goes_on_otherwise(
    whole: Any, tmp_path: Path, lacks: str, monkeypatch: Any
) -> None:
    """Dropout, the means of an epoch, or the rows: a DataLoader begins again at its
    first."""
    how: dict[str, Any] = {}
    if lacks == "random numbers":
        monkeypatch.setattr(per_rank, "write_states", lambda *_: None)
    elif lacks == "sums":
        monkeypatch.setattr(_compat, "add_sum_state", lambda *_: None)
    else:
        how["loader"] = DataLoader(TRAIN, 4, collate_fn=pad)  # type: ignore[arg-type]
        whole = state_of(*train(tmp_path / "whole", **how)), rows(tmp_path / "whole")
    folder = tmp_path / "run"
    found = interrupted(folder, KillAt("on_train_batch_start", 6), **how)
    others = " ".join(differing(whole, (state_of(*found), rows(folder))))
    assert (".weights.net.head.weight" in others) == (lacks != "sums")
    assert "train/mean" in others
    assert "train/loss_epoch" in others


@pytest.mark.filterwarnings("ignore:Experiment logs directory")
@pytest.mark.filterwarnings("ignore:ExactResume. a CSVLogger begins its file anew")
def test_without_metric_rows_some_are_twice_or_lost(
    whole: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """A resumed run logs values for the second time, which differ if something else has
    changed. And what Lightning logs after a checkpoint is lost. Lightning's CSVLogger
    forgets all rows before."""
    kill: Any = KillAt("on_train_batch_start", 9)
    none = type("None", (pl.Callback,), {})
    monkeypatch.setattr(exact_resume, "MetricRows", none)
    with pytest.raises(Killed):
        train(tmp_path / "a", kill=kill, every=2)
    logger = MetricsCSVLogger(tmp_path / "a")
    logger.replace([{**row, "train/loss_step": "9"} for row in logger.rows()])
    train(tmp_path / "a", resume=True, every=2)
    assert len(rows(tmp_path / "a")) > len(whole[1])
    interrupted(tmp_path / "b", KillAt("on_train_batch_end", 5), last=True)
    monkeypatch.undo()
    assert close(whole[1], rows(tmp_path / "b")) != []
    folder = tmp_path / "c"
    for kill in (KillAt("on_train_batch_start", 11), None):
        logger = CSVLogger(folder, name="", version="")
        with contextlib.suppress(Killed):
            train(folder, resume=kill is None, kill=kill, logger=logger)
    assert min(int(row["step"]) for row in rows(folder)) > 1


# ---- real signals, to processes of their own -----------------------------------------


class Slow(pl.Callback):
    """Says when the first batch has begun, and takes its time."""

    def __init__(self, begun: Any) -> None:
        self.begun = begun

    def __deepcopy__(self, memo: Any) -> Any:
        return pl.Callback()  # in a rehearsal

    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        self.begun.set()
        time.sleep(0.05)  # on a quick machine too, several stops come before the end


def _run(folder: Path, begun: Any) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):  # when training has ended: too late
        signal.signal(number, lambda *_: None)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with quiet_lightning(), open(os.devnull, "w") as nothing:
        with contextlib.redirect_stdout(nothing):
            train(folder, resume=True, others=[Slow(begun)])
    begun.set()  # a run that was stopped in its last batch has none left
    os._exit(0)  # what pytest does at the end of a process is not ours to do


STOPPED = {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGINT: 130}


def test_process_that_is_interrupted_at_random(
    whole: Any, whole_folder: Path, tmp_path: Path
) -> None:
    folder, draw = tmp_path / "run", random.Random(0)
    context = get_context("fork")  # without the import of Lightning each time
    statuses, sent = [], []
    while not statuses or (statuses[-1] != 0 and len(statuses) < 50):
        begun = context.Event()
        process = context.Process(target=_run, args=(folder, begun), daemon=True)
        process.start()
        sent.append(draw.choice([*STOPPED]))
        try:
            assert begun.wait(240)
            process.join(draw.uniform(0, 0.2) * len(statuses))  # the first at once
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, sent[-1])
            process.join(240)
            assert process.exitcode is not None
        finally:
            process.kill()
        statuses.append(process.exitcode)
    assert statuses[-1] == 0
    assert len(statuses) > 3
    assert statuses[:-1] == [STOPPED[number] for number in sent[:-1]]
    ends = [
        torch.load(each / "checkpoints" / "last.ckpt", weights_only=True)
        for each in (whole_folder, folder)
    ]
    for name in ("state_dict", "optimizer_states", "lr_schedulers", "global_step"):
        assert differing(ends[0][name], ends[1][name]) == []
    assert close(whole[1], rows(folder)) == []
