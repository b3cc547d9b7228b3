"""Signals that end a run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from functools import partial
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from tests.helpers import (
    TokenModule,
    loader,
    pad,
    quiet_lightning,
    ragged_sequences,
    raise_rank_errors,
    rank_loader,
    run_cases,
)
from tests.helpers import trainer as make_trainer
from tests.lit.resume.interrupting import KillAt, ask
from tests.startup import forked
from tests.zoo.callbacks import Ending
from trainkit import ResumableLoader
from trainkit.lit.callback.base import Stopped
from trainkit.lit.front.exact_resume import ExactResume
from trainkit.lit.resume.first_signal import PREEMPTION, SIGNALS

trainer = partial(make_trainer, enable_checkpointing=True)
SEQUENCES = ragged_sequences(24)
TERM, INT = signal.SIGTERM, signal.SIGINT
BACKWARD = "on_after_backward"


def steps_in(path: Any) -> int:
    return torch.load(path, weights_only=True)["global_step"]


def stopping(folder: Any = None, every: int | None = None) -> ExactResume:
    """Saves where it is stopped, and nowhere else."""
    return ExactResume(dirpath=folder, every_n_train_steps=every, warns=False)


class Always(Callback):
    """Sends SIGTERM at one call of a hook, and counts all."""

    def __init__(self, hook: str, *, at: int = 1) -> None:
        self.calls, self.at = 0, at
        setattr(self, hook, self._call)

    def _call(self, *args: Any, **kwargs: Any) -> None:
        self.calls += 1
        if self.calls == self.at:
            signal.raise_signal(TERM)


class Validated(TokenModule):
    """Can be validated, tested and asked."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.training_step(batch, batch_idx)

    test_step = predict_step = validation_step


def stopped(*callbacks: Any, val: Any = None, **how: Any) -> Any:
    """The error that ended a `fit` with these callbacks, and its Trainer."""
    each = trainer(callbacks=list(callbacks), **how)
    with pytest.raises(SystemExit) as caught:
        each.fit(Validated() if val else TokenModule(), loader(SEQUENCES, 4), val)
    return caught.value, each


@pytest.fixture(autouse=True)
def handlers() -> Any:
    """Whatever happens, the handlers of before are those of after."""
    before = [signal.getsignal(number) for number in SIGNALS]
    with quiet_lightning():
        yield
    assert [signal.getsignal(number) for number in SIGNALS] == before


# ---- while training ------------------------------------------------------------------


@pytest.mark.parametrize("number", PREEMPTION)
def test_a_handler_that_requeues_the_job_runs_once_the_run_is_saved(
    tmp_path: Path, number: signal.Signals
) -> None:
    """As submitit sets one before the training; it is there again afterwards."""
    found: list[tuple[int, int]] = []
    path = tmp_path / "last.ckpt"
    before = signal.signal(number, lambda n, _: found.append((n, steps_in(path))))
    try:
        stopped(ask(BACKWARD, 2, number, number), stopping(tmp_path))
        assert found == [(number, 3)]
        signal.raise_signal(number)
        assert found == 2 * [(number, 3)]
    finally:
        signal.signal(number, before)


def test_lightning_requeues_under_slurm_with_an_exact_checkpoint(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """Its own handler saves `hpc_ckpt` and asks SLURM, now between two steps."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f"#!/bin/sh\necho $* >> {tmp_path / 'asked'}\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    slurm = {"plugins": [SLURMEnvironment(auto_requeue=True)]}
    asks = ask(BACKWARD, 2, signal.SIGUSR1)
    stopped(asks, stopping(tmp_path), default_root_dir=tmp_path, **slurm)
    assert steps_in(tmp_path / "hpc_ckpt_1.ckpt") == 3
    assert (tmp_path / "asked").read_text() == "requeue 7\n"


def in_best(folder: Path) -> list[Callback]:
    return [ModelCheckpoint(folder / "best", save_top_k=0)]


NO_SANITY = {"num_sanity_val_steps": 0}
FIRST, LAST, BEST = ("last.ckpt", 2), ("last.ckpt", 3), ("best/last.ckpt", 3)
DRY: dict[str, Any] = {"fast_dev_run": 4}
# The hook, its signals, the steps between two checkpoints (False: no folder is given
# either), others that save, options; the status, and the file that is saved with its
# step.
STOPS: list[Any] = [
    (BACKWARD, [INT], None, None, {}, 130, LAST),
    (BACKWARD, [TERM], None, None, {}, 143, LAST),
    (BACKWARD, [signal.SIGUSR1], None, None, {}, 138, LAST),
    (BACKWARD, [signal.SIGUSR2], None, None, {}, 140, LAST),
    (BACKWARD, [TERM], False, in_best, {}, 143, BEST),
    (BACKWARD, [TERM], False, None, {}, 143, None),  # no checkpoint was wanted
    (BACKWARD, [TERM], None, None, DRY, 143, None),
    (BACKWARD, [TERM, TERM], None, None, {}, 143, LAST),  # a repeated one is one
    (BACKWARD, [INT, INT], None, None, {}, 1, None),  # ends at once
    (BACKWARD, [INT, INT], 1, None, {}, 1, FIRST),  # the one before
    ("on_sanity_check_end", [TERM], None, None, {}, 143, None),
    ("on_train_start", [TERM], None, None, {}, 143, None),
    ("on_train_start", [TERM], None, None, NO_SANITY, 143, None),  # before we listen
]


@pytest.mark.parametrize(
    ("hook", "numbers", "every", "others", "how", "status", "saved"), STOPS
)
def test_where_a_stopped_run_is_saved_and_how_it_says_that_it_ended(
    tmp_path: Path,
    capfd: Any,
    hook: str,
    numbers: list[signal.Signals],
    every: int | None,
    others: Any,
    how: dict[str, Any],
    status: int,
    saved: tuple[str, int] | None,
) -> None:
    stop = stopping() if every is False else stopping(tmp_path, every)
    more = others(tmp_path) if others else []
    how = {"default_root_dir": tmp_path, **how}
    asks = ask(hook, 2, *numbers) if hook == BACKWARD else Always(hook)
    error, each = stopped(asks, *more, stop, val=loader(SEQUENCES, 8), **how)
    is_quick = numbers == [INT, INT]
    assert isinstance(error, Stopped) is not is_quick
    assert (error.code, stop.stopped_by) == (status, numbers[0])
    assert each.global_step == (0 if hook != BACKWARD else 2 if is_quick else 3)
    told = f"{numbers[0].name}: stopping after this batch" in capfd.readouterr().err
    assert told is (how.get("num_sanity_val_steps") != 0)  # or before we listen
    if saved is None:
        assert stop.checkpoint_path is None
        assert not list(tmp_path.iterdir())
    else:
        assert stop.checkpoint_path == str(tmp_path / saved[0])
        assert steps_in(stop.checkpoint_path) == saved[1]
        assert is_quick or "since it has no load_state_dict" in stop.caveat


def test_runs_that_save_nothing(tmp_path: Path) -> None:
    """Nobody stops it, or it ends at once; another run's file is not this one's."""
    stop = stopping(tmp_path)
    trainer(callbacks=[stop]).fit(TokenModule(), loader(SEQUENCES, 4))
    assert stop.stopped_by is stop.checkpoint_path is None
    assert not list(tmp_path.iterdir())
    (tmp_path / "last.ckpt").write_bytes(b"")
    stopped(ask(BACKWARD, 2, INT, INT), stop)
    assert (stop.stopped_by, stop.checkpoint_path) == (INT, None)
    stopped(Ending(2, SIGTERMException()), stop)  # of somebody who heard it before
    assert (stop.stopped_by, stop.checkpoint_path) == (TERM, None)


def test_validation_is_finished_first(tmp_path: Path) -> None:
    asks = ask("on_validation_batch_start", 2)
    count = Always("on_validation_batch_end", at=0)
    how: dict[str, Any] = {"val_check_interval": 3, "num_sanity_val_steps": 0}
    val = loader(SEQUENCES, 8)
    _, each = stopped(asks, count, stopping(tmp_path), val=val, **how)
    assert count.calls == each.global_step == 3


@pytest.mark.parametrize("hook", ["on_train_end", "on_fit_end"])
def test_signal_after_the_last_batch_loses_nothing(tmp_path: Path, hook: str) -> None:
    stop = ExactResume(dirpath=tmp_path)
    before = signal.signal(TERM, lambda *_: None)  # of a run that is over
    try:
        each = trainer(callbacks=[Always(hook), stop])
        each.fit(TokenModule(), ResumableLoader(SEQUENCES, 4, collate_fn=pad))
    finally:
        signal.signal(TERM, before)
    assert stop.stopped_by is None
    assert steps_in(stop.path) == 12


EVALUATIONS = {"validate": "validation", "test": "test", "predict": "predict"}


@pytest.mark.parametrize("how", EVALUATIONS)
def test_evaluation_ends_after_a_batch(how: str, tmp_path: Path) -> None:
    stop, asks = stopping(tmp_path), Always(f"on_{EVALUATIONS[how]}_batch_start")
    with pytest.raises(Stopped):
        getattr(trainer(callbacks=[asks, stop]), how)(Validated(), loader(SEQUENCES, 4))
    assert asks.calls == 1
    assert (stop.stopped_by, stop.checkpoint_path) == (TERM, None)


def test_other_thread_is_left_as_it_is(tmp_path: Path) -> None:
    stop, errors = stopping(tmp_path), []

    def fit() -> None:
        try:
            trainer(callbacks=[stop]).fit(TokenModule(), loader(SEQUENCES, 4))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=fit)
    thread.start()
    thread.join(240)
    assert not thread.is_alive()
    assert not errors
    assert stop.stopped_by is None


def test_workers_leave_the_signal_to_the_run(tmp_path: Path) -> None:
    """Ctrl+C reaches a loader's workers too, and they must go on until the end."""

    def interrupt_all(_: Any) -> None:
        for child in active_children():
            assert child.pid is not None
            os.kill(child.pid, INT)
        signal.raise_signal(INT)

    stop = stopping(tmp_path)
    each = trainer(callbacks=[KillAt("on_after_backward", 2, interrupt_all), stop])
    worked = ResumableLoader(SEQUENCES, 4, num_workers=2, collate_fn=pad)
    with pytest.raises(Stopped):
        each.fit(TokenModule(), worked)
    assert stop.checkpoint_path is not None


# ---- several ranks -------------------------------------------------------------------


def on_ranks(world: int, *callbacks: Any) -> Any:
    ddp: Any = {"strategy": "ddp", "devices": world, "use_distributed_sampler": False}
    return trainer(callbacks=[*callbacks], **ddp)


def one_rank_is_asked(rank: int, world: int, folder: str, asked: int) -> Any:
    stop = stopping(folder)
    each = on_ranks(world, stop, *[ask(BACKWARD, 1)] * (rank == asked))
    try:
        each.fit(TokenModule(), rank_loader(SEQUENCES, 2, rank, world))
    except Stopped as ended:
        return each.global_step, ended.code, stop.checkpoint_path
    return None


def evaluate_unevenly(rank: int, world: int, how: str, asked: bool) -> Any:
    """The first rank has two batches and the second six."""
    asks = Always(f"on_{EVALUATIONS[how]}_batch_start", at=2 if asked else 0)
    share = loader(SEQUENCES[:4] if rank == 0 else SEQUENCES[:12], 2)
    try:
        getattr(on_ranks(world, asks, stopping()), how)(Validated(), share)
    except Stopped as ended:
        return asks.calls, ended.code
    return asks.calls, None


def test_ranks_stop_training_together_and_evaluations_alone(tmp_path: Path) -> None:
    """In an evaluation ranks may have different numbers of batches."""
    cases: Any = {how: (evaluate_unevenly, how, False) for how in EVALUATIONS}
    cases["asked"] = (evaluate_unevenly, "predict", True)
    for rank in (0, 1):
        cases[rank] = (one_rank_is_asked, str(tmp_path / str(rank)), rank)
    found = {k: raise_rank_errors(each) for k, each in run_cases(2, cases).items()}
    for how in EVALUATIONS:
        assert found[how] == [(2, None), (6, None)]
    assert found["asked"] == [(2, 143), (2, 143)]
    for asked in (0, 1):
        (first, first_code, path), (second, code, other_path) = found[asked]
        assert first == second
        assert first in (2, 3)
        assert path == other_path == str(tmp_path / str(asked) / "last.ckpt")
        # Lightning kills the first one for another's.
        assert (first_code, code) == (143, 0)


# ---- a signal, and the processes that it reaches -------------------------------------

PROGRAM = """
import os, signal, time
from trainkit.lit.resume.first_signal import FirstSignal
signals = FirstSignal("the rest follows", on_ctrl_c="Ctrl+C again quits")
signals.listen()
ready, wrote = os.pipe()
child = os.fork()
if not child:
    while True:
        os.write(wrote, b"!")
        time.sleep(0.001)
os.close(wrote)
os.read(ready, 1)
os.kill(child, signal.SIGINT)
print(all(os.read(ready, 1) for _ in range(100)))
os.kill(child, signal.SIGTERM)
status = os.waitpid(child, 0)[1]
print(os.WTERMSIG(status) == signal.SIGTERM, signals.heard)
signal.raise_signal(signal.SIGINT)
print(signals.heard == signal.SIGINT)
signal.raise_signal(signal.SIGTERM)
print(signals.heard == signal.SIGINT)
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    print("interrupted")
"""


SWALLOWED = """
import signal
from trainkit.cli.errors import remember_ctrl_c
from trainkit.lit.resume.first_signal import FirstSignal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
if {remembers}:
    remember_ctrl_c()
class Collected:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)
Collected()
signals = FirstSignal("the rest follows", on_ctrl_c="Ctrl+C again quits")
signals.listen()
print(signals.heard)
"""


def run_by_itself(folder: Path, program: str) -> Any:
    path = folder / "program.py"
    path.write_text(program)
    how: Any = {"env": {**os.environ, **forked()}, "capture_output": True}
    how |= {"text": True, "check": True, "timeout": 120}
    return subprocess.run([sys.executable, str(path)], **how)


@pytest.mark.parametrize(("remembers", "heard"), [(True, 2), (False, 0)])
def test_a_ctrl_c_that_a_finalizer_swallowed_is_heard(
    tmp_path: Path, remembers: bool, heard: int
) -> None:
    done = run_by_itself(tmp_path, SWALLOWED.format(remembers=remembers))
    assert int(done.stdout) == heard
    assert "Exception ignored" in done.stderr


def test_a_worker_outlives_ctrl_c_and_its_parent_notes_it(tmp_path: Path) -> None:
    done = run_by_itself(tmp_path, PROGRAM)
    assert done.stdout.split() == ["True", "True", "0", "True", "True", "interrupted"]
    said = "\ntrainkit | SIGINT: the rest follows; Ctrl+C again quits\n"
    assert done.stderr == said
