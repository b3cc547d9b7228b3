"""A run that is interrupted anywhere and goes on ends as one that was not."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
import warnings
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from tests.helpers import pad, quiet_lightning
from tests.lit.resume.interrupting import (
    TRAIN,
    Counting,
    KillAt,
    Killed,
    close,
    differing,
    interrupted,
    rows,
    state_of,
    train,
)

pytestmark = [
    pytest.mark.usefixtures("quiet"),
    # A killed process says nothing; in ours Lightning still tells the callbacks.
    pytest.mark.filterwarnings("ignore:accumulation. an open window:UserWarning"),
    # Killed before its first checkpoint, a run begins again.
    pytest.mark.filterwarnings("ignore:.*held the rows of another:UserWarning"),
]

HOOKS = [
    "on_train_batch_start",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_batch_end",
    "on_validation_end",
    "on_train_epoch_start",
    "on_train_epoch_end",
    "on_save_checkpoint",
    "on_train_end",
]
BATCHES = range(20)
"""Two epochs of ten: windows of 3, 3, 3, 1, and a validation after every fourth."""


@pytest.fixture
def quiet(capsys: pytest.CaptureFixture[str]) -> Any:
    with quiet_lightning():
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The state and the rows of the run that nobody interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    with quiet_lightning():
        return state_of(*train(folder)), rows(folder)


@pytest.mark.parametrize("is_last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("hook", HOOKS)
def test_killed_run_goes_on_exactly(
    whole: Any, tmp_path: Path, hook: str, is_last: bool
) -> None:
    """Killed in a hook, before all other callbacks or after them.

    Every seventh batch is another place of its window; the hooks share out the first.
    """
    state, all_rows = whole
    for batch in BATCHES[(HOOKS.index(hook) + 3 * is_last) % 7 :: 7]:
        folder = tmp_path / str(batch)
        every = 1 + batch % 3
        found = interrupted(folder, KillAt(hook, batch), last=is_last, every=every)
        assert differing(state, state_of(*found)) == [], batch
        assert differing(all_rows, rows(folder)) == [], batch


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("hook", HOOKS)
def test_stopped_run_goes_on_exactly(
    whole: Any, tmp_path: Path, hook: str, number: signal.Signals
) -> None:
    state, all_rows = whole
    for batch in BATCHES[4 * (number == signal.SIGTERM) :: 8]:
        folder = tmp_path / str(batch)
        ask = KillAt(hook, batch, lambda _: signal.raise_signal(number))
        found = interrupted(folder, ask, every=100)
        assert differing(state, state_of(*found)) == [], batch
        assert close(all_rows, rows(folder)) == [], batch


@pytest.mark.parametrize(
    "how",
    [
        {"scheduler": "plateau"},
        {"scheduler": "epoch"},
        {"max_steps": 7, "max_epochs": -1},
        {"max_epochs": 3, "check_val_every_n_epoch": None, "val_check_interval": 7},
        {"val_check_interval": 1.0},
        {"limit_val_batches": 0},
        {"accumulate_grad_batches": 1},
        {"accumulate_grad_batches": 10},
        {"log_every_n_steps": 3},
        {"gradient_clip_val": 0.1},
        {"num_workers": 2},
        {"kind": Counting},
        {
            "kind": Counting,
            "accumulate_grad_batches": 1,
            "without": ["AccumulationCallback", "WindowMonitor"],
        },
    ],
    ids=lambda how: "-".join(map(str, how.values())),
)
def test_trained_in_other_ways(tmp_path: Path, how: dict[str, Any]) -> None:
    state = state_of(*train(tmp_path / "whole", **how))
    all_rows = rows(tmp_path / "whole")
    first, second, third = BATCHES[2 if "num_workers" in how else 1 :: 8]
    hook = "on_train_batch_start"
    for kill in (
        KillAt(hook, first),
        KillAt(hook, second, lambda _: signal.raise_signal(signal.SIGTERM)),
        KillAt(hook, third),
    ):
        folder = tmp_path / str(kill.batch)
        found = interrupted(folder, kill, **how)
        assert differing(state, state_of(*found)) == [], kill.batch
        assert close(all_rows, rows(folder)) == [], kill.batch


def test_interrupted_again_and_again(whole: Any, tmp_path: Path) -> None:
    state, all_rows = whole
    for batch in BATCHES[1:]:
        kill = KillAt("on_train_batch_end", batch)
        try:
            train(tmp_path, resume=True, kill=kill)
        except Killed:
            pass
    found = train(tmp_path, resume=True)
    assert differing(state, state_of(*found)) == []
    assert differing(all_rows, rows(tmp_path)) == []


# ---- what a checkpoint and a row are written in --------------------------------------


@pytest.mark.parametrize("nth", range(1, 6))
def test_killed_while_a_checkpoint_is_written(
    whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    """Half of it is in the file when it dies: the one before stands."""
    calls = 0
    move = os.replace

    def die_at(source: Any, target: Any) -> None:
        nonlocal calls
        if str(target).endswith("last.ckpt"):
            calls += 1
            if calls == nth:
                content = Path(source).read_bytes()
                Path(source).write_bytes(content[: len(content) // 2])
                raise Killed
        move(source, target)

    monkeypatch.setattr(os, "replace", die_at)
    with pytest.raises(Killed):
        train(tmp_path)
    monkeypatch.undo()
    assert (tmp_path / "checkpoints" / "last.ckpt").exists() == (nth > 1)
    found = train(tmp_path, resume=nth > 1) if nth > 1 else None
    if found is not None:
        assert differing(whole[0], state_of(*found)) == []
        assert differing(whole[1], rows(tmp_path)) == []


def test_row_that_was_cut_off_is_written_again(whole: Any, tmp_path: Path) -> None:
    with pytest.raises(Killed):
        train(tmp_path, kill=KillAt("on_train_batch_start", 13))
    file = tmp_path / "metrics.csv"
    file.write_text(file.read_text() + "5,1,0.7")
    found = train(tmp_path, resume=True)
    assert differing(whole[0], state_of(*found)) == []
    assert differing(whole[1], rows(tmp_path)) == []


def test_late_log_of_the_module_is_lost_only_in_the_very_moment(tmp_path: Path) -> None:
    train(tmp_path / "whole", logs_late=True)
    all_rows = rows(tmp_path / "whole")
    interrupted(tmp_path / "a", KillAt("on_train_batch_start", 6), logs_late=True)
    assert differing(all_rows, rows(tmp_path / "a")) == []
    kill = KillAt("on_train_batch_end", 5)  # after the checkpoint, before the row
    interrupted(tmp_path / "b", kill, last=True, logs_late=True)
    assert differing(all_rows, rows(tmp_path / "b")) == [".4: ['train/late']"]


# ---- what it takes -------------------------------------------------------------------


def _after_a_kill(folder: Path, *, at: int = 6, **how: Any) -> tuple[Any, Any]:
    found = interrupted(folder, KillAt("on_train_batch_start", at), **how)
    return state_of(*found), rows(folder)


@pytest.mark.filterwarnings("ignore:.*your dataloader is not resumable")
@pytest.mark.filterwarnings("ignore:checkpoint. it was taken inside a window")
def test_plain_loader_does_not_go_on(tmp_path: Path) -> None:
    """Negative control: a DataLoader begins again at its first row."""
    loader = DataLoader(TRAIN, 4, collate_fn=pad)  # type: ignore[arg-type]
    state = state_of(*train(tmp_path / "whole", loader=loader))
    found, _ = _after_a_kill(tmp_path / "killed", loader=loader)
    assert ".weights.net.head.weight" in differing(state, found)


def test_without_random_state_dropout_differs(whole: Any, tmp_path: Path) -> None:
    """Negative control."""
    found, _ = _after_a_kill(tmp_path, without=["RandomState"])
    assert ".weights.net.head.weight" in differing(whole[0], found)


def test_without_epoch_sums_the_mean_is_that_of_the_rest(
    whole: Any, tmp_path: Path
) -> None:
    """Negative control: Lightning leaves them out of its checkpoints."""
    found, found_rows = _after_a_kill(tmp_path, without=["EpochSums"])
    assert differing(whole[0], found) == []
    wrong = " ".join(differing(whole[1], found_rows))
    assert "train/mean" in wrong
    assert "train/loss_epoch" in wrong


def test_without_metric_rows_some_are_there_twice(whole: Any, tmp_path: Path) -> None:
    """Negative control."""
    _, found_rows = _after_a_kill(tmp_path, without=["MetricRows"], every=2, at=9)
    assert len(found_rows) > len(whole[1])


@pytest.mark.filterwarnings("ignore:Experiment logs directory")
def test_csv_logger_of_lightning_forgets_the_rows_before(tmp_path: Path) -> None:
    """Negative control."""
    folder = tmp_path / "run"
    kill = KillAt("on_train_batch_start", 11)
    with pytest.raises(Killed):
        train(folder, kill=kill, logger=CSVLogger(folder, name="", version=""))
    logger = CSVLogger(folder, name="", version="")
    train(folder, resume=True, logger=logger)
    assert min(int(row["step"]) for row in rows(folder)) > 1


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_stateful_loader_of_torchdata_goes_on(tmp_path: Path) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def loader() -> Any:
        return stateful.StatefulDataLoader(TRAIN, 4, collate_fn=pad)

    state = state_of(*train(tmp_path / "whole", loader=loader()))
    for batch in (2, 6, 13):
        folder = tmp_path / str(batch)
        kill = KillAt("on_train_batch_start", batch + 1)
        with pytest.raises(Killed):
            train(folder, kill=kill, loader=loader())
        found = state_of(*train(folder, resume=True, loader=loader()))
        assert differing(state, found) == []
        assert differing(rows(tmp_path / "whole"), rows(folder)) == []


# ---- real signals, to processes of their own -----------------------------------------


class Slow(pl.Callback):
    """Says when the first batch has begun, and takes its time."""

    def __init__(self, begun: Any) -> None:
        self.begun = begun

    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        self.begun.set()
        time.sleep(0.01)


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


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_process_that_is_interrupted_at_random(
    tmp_path: Path, number: signal.Signals
) -> None:
    train(tmp_path / "whole")
    folder, draw = tmp_path / "run", random.Random(int(number))
    context = get_context("fork")  # without the import of Lightning each time
    statuses = []
    while not statuses or (statuses[-1] != 0 and len(statuses) < 50):
        begun = context.Event()
        process = context.Process(target=_run, args=(folder, begun), daemon=True)
        process.start()
        try:
            assert begun.wait(240)
            process.join(draw.uniform(0, 0.2) * (1 + len(statuses) / 4))
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, number)
            process.join(240)
            assert process.exitcode is not None
        finally:
            process.kill()
        statuses.append(process.exitcode)
    assert statuses[-1] == 0
    stopped = {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGINT: 130}[number]
    assert set(statuses[:-1]) == {stopped}
    ends = [
        torch.load(each / "checkpoints" / "last.ckpt", weights_only=True)
        for each in (tmp_path / "whole", folder)
    ]
    for name in ("state_dict", "optimizer_states", "lr_schedulers", "global_step"):
        assert differing(ends[0][name], ends[1][name]) == []
    assert close(rows(tmp_path / "whole"), rows(folder)) == []
