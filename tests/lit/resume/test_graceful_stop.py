"""Signals that end a run."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.helpers import (
    TokenModule,
    loader,
    quiet_lightning,
    ragged_sequences,
    raise_rank_errors,
    rank_loader,
    run_ranks,
    trainer,
)
from tests.lit.resume.interrupting import KillAt
from trainkit.lit.callback.base import Stopped
from trainkit.lit.resume.first_signal import PREEMPTION, SIGNALS
from trainkit.lit.resume.graceful_stop import GracefulStop
from trainkit.lit.resume.run_checkpoint import RunCheckpoint

SEQUENCES = ragged_sequences(24)


def steps_in(path: Any) -> int:
    return torch.load(path, weights_only=True)["global_step"]


def raising(*numbers: signal.Signals) -> Any:
    def raise_them(_: Any) -> None:
        for number in numbers:
            signal.raise_signal(number)

    return raise_them


class Validated(TokenModule):
    """Can be validated, tested and asked."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.training_step(batch, batch_idx)

    test_step = predict_step = validation_step


@pytest.fixture(autouse=True)
def handlers() -> Any:
    """Whatever happens, the handlers of before are those of after."""
    before = [signal.getsignal(number) for number in SIGNALS]
    with quiet_lightning():
        yield
    after = [signal.getsignal(number) for number in SIGNALS]
    assert after == before


@pytest.mark.parametrize(
    ("number", "status"),
    [
        (signal.SIGINT, 130), (signal.SIGTERM, 143),
        (signal.SIGUSR1, 138), (signal.SIGUSR2, 140),
    ],
)  # fmt: skip
def test_signal_saves_and_says_how_it_ended(
    tmp_path: Path, capfd: Any, number: signal.Signals, status: int
) -> None:
    stop = GracefulStop(tmp_path)
    each = trainer(callbacks=[KillAt("on_after_backward", 2, raising(number)), stop])
    with pytest.raises(Stopped) as caught:
        each.fit(TokenModule(), loader(SEQUENCES, 4))
    assert caught.value.code == status
    assert stop.stopped_by is number
    assert stop.checkpoint_path == str(tmp_path / "last.ckpt")
    assert "since it has no load_state_dict" in stop.caveat
    assert steps_in(stop.checkpoint_path) == 3
    assert f"{number.name}: stopping after this batch" in capfd.readouterr().err


@pytest.mark.parametrize("number", PREEMPTION)
def test_a_handler_that_requeues_the_job_runs_once_the_run_is_saved(
    tmp_path: Path, number: signal.Signals
) -> None:
    """As submitit sets one before the training; it is there again afterwards."""
    found: list[tuple[int, int]] = []
    path = tmp_path / "last.ckpt"
    before = signal.signal(number, lambda n, _: found.append((n, steps_in(path))))
    try:
        asks = KillAt("on_after_backward", 2, raising(number, number))
        each = trainer(callbacks=[asks, GracefulStop(tmp_path)])
        with pytest.raises(Stopped):
            each.fit(TokenModule(), loader(SEQUENCES, 4))
        assert found == [(number, 3)]
        signal.raise_signal(number)
        assert found == 2 * [(number, 3)]
    finally:
        signal.signal(number, before)


def test_lightning_requeues_under_slurm_with_an_exact_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own handler saves `hpc_ckpt` and asks SLURM, now between two steps."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f"#!/bin/sh\necho $* >> {tmp_path / 'asked'}\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    asks = KillAt("on_after_backward", 2, raising(signal.SIGUSR1))
    each = trainer(
        callbacks=[asks, GracefulStop(tmp_path)],
        plugins=[SLURMEnvironment(auto_requeue=True)],
        default_root_dir=tmp_path,
    )
    with pytest.raises(Stopped):
        each.fit(TokenModule(), loader(SEQUENCES, 4))
    assert steps_in(tmp_path / "hpc_ckpt_1.ckpt") == 3
    assert (tmp_path / "asked").read_text() == "requeue 7\n"


def test_it_saves_where_the_checkpoints_are(tmp_path: Path) -> None:
    stop, ask = GracefulStop(), KillAt("on_after_backward", 2, raising(signal.SIGTERM))
    best = ModelCheckpoint(tmp_path / "best", save_top_k=0)
    each = trainer(callbacks=[ask, best, stop], enable_checkpointing=True)
    with pytest.raises(Stopped):
        each.fit(TokenModule(), loader(SEQUENCES, 4))
    assert stop.checkpoint_path == str(tmp_path / "best/last.ckpt")
    assert steps_in(stop.checkpoint_path) == 3


@pytest.mark.parametrize("how", [{}, {"fast_dev_run": 4}])
def test_nothing_is_saved_where_no_checkpoint_was_wanted(
    tmp_path: Path, how: dict[str, Any]
) -> None:
    stop = GracefulStop(tmp_path if how else None)
    ask = KillAt("on_after_backward", 2, raising(signal.SIGTERM))
    each = trainer(callbacks=[ask, stop], default_root_dir=tmp_path, **how)
    with pytest.raises(Stopped) as caught:
        each.fit(TokenModule(), loader(SEQUENCES, 4))
    assert caught.value.code == 143
    assert stop.checkpoint_path is None
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_of_another_run_is_not_where_this_one_goes_on(
    tmp_path: Path,
) -> None:
    (tmp_path / "last.ckpt").write_bytes(b"")
    stop = GracefulStop(tmp_path)
    ask = KillAt("on_after_backward", 2, raising(signal.SIGINT, signal.SIGINT))
    with pytest.raises(SystemExit):
        trainer(callbacks=[ask, stop]).fit(TokenModule(), loader(SEQUENCES, 4))
    assert stop.stopped_by is signal.SIGINT
    assert stop.checkpoint_path is None


def test_run_that_nobody_stops(tmp_path: Path) -> None:
    stop = GracefulStop(tmp_path)
    trainer(callbacks=[stop]).fit(TokenModule(), loader(SEQUENCES, 4))
    assert stop.stopped_by is stop.checkpoint_path is None
    assert not list(tmp_path.iterdir())


def test_second_interrupt_ends_at_once(tmp_path: Path) -> None:
    stop = GracefulStop(tmp_path)
    ask = KillAt("on_after_backward", 2, raising(signal.SIGINT, signal.SIGINT))
    with pytest.raises(SystemExit) as caught:
        trainer(callbacks=[ask, stop]).fit(TokenModule(), loader(SEQUENCES, 4))
    assert not isinstance(caught.value, Stopped)
    assert stop.stopped_by is signal.SIGINT
    assert stop.checkpoint_path is None
    assert not list(tmp_path.iterdir())


def test_second_interrupt_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    stop = GracefulStop()
    ask = KillAt("on_after_backward", 2, raising(signal.SIGINT, signal.SIGINT))
    saver = RunCheckpoint(tmp_path, every_n_train_steps=1)
    with pytest.raises(SystemExit):
        trainer(callbacks=[ask, stop, saver], enable_checkpointing=True).fit(
            TokenModule(), loader(SEQUENCES, 4)
        )
    assert stop.checkpoint_path == str(tmp_path / "last.ckpt")
    assert steps_in(stop.checkpoint_path) == 2


def test_repeated_sigterm_is_one(tmp_path: Path) -> None:
    stop = GracefulStop(tmp_path)
    ask = KillAt("on_after_backward", 2, raising(signal.SIGTERM, signal.SIGTERM))
    with pytest.raises(Stopped):
        trainer(callbacks=[ask, stop]).fit(TokenModule(), loader(SEQUENCES, 4))
    assert stop.checkpoint_path is not None


def test_validation_is_finished_first(tmp_path: Path) -> None:
    stop, num_batches = GracefulStop(tmp_path), []
    ask = KillAt("on_validation_batch_start", 2, raising(signal.SIGTERM))
    count = KillAt("on_validation_batch_end", 0, num_batches.append)
    count._look = lambda *_: num_batches.append(1)  # type: ignore[method-assign]
    count.on_validation_batch_end = count._look  # type: ignore[method-assign]
    each = trainer(
        callbacks=[ask, count, stop], val_check_interval=3, num_sanity_val_steps=0
    )
    with pytest.raises(Stopped):
        each.fit(Validated(), loader(SEQUENCES, 4), loader(SEQUENCES, 8))
    assert len(num_batches) == 3
    assert each.global_step == 3


@pytest.mark.parametrize("hook", ["on_sanity_check_end", "on_train_start"])
def test_signal_before_the_first_batch(tmp_path: Path, hook: str) -> None:
    stop, ask = GracefulStop(tmp_path), KillAt(hook, -5, raising(signal.SIGTERM))
    setattr(ask, hook, lambda *_: signal.raise_signal(signal.SIGTERM))
    each = trainer(callbacks=[ask, stop])
    with pytest.raises(Stopped):
        each.fit(Validated(), loader(SEQUENCES, 4), loader(SEQUENCES, 8))
    assert each.global_step == 0
    assert stop.stopped_by is signal.SIGTERM
    assert stop.checkpoint_path is None


@pytest.mark.parametrize("hook", ["on_train_end", "on_fit_end"])
def test_signal_after_the_last_batch_loses_nothing(tmp_path: Path, hook: str) -> None:
    stop, ask = GracefulStop(), KillAt(hook, 0)
    number = signal.SIGTERM
    before = signal.signal(number, lambda *_: None)  # of a run that is over
    try:
        setattr(ask, hook, lambda *_: signal.raise_signal(number))
        saver = RunCheckpoint(tmp_path)
        each = trainer(callbacks=[ask, stop, saver], enable_checkpointing=True)
        each.fit(TokenModule(), loader(SEQUENCES, 4))
    finally:
        signal.signal(number, before)
    assert stop.stopped_by is None
    assert steps_in(saver.path) == 12


@pytest.mark.parametrize("how", ["validate", "test", "predict"])
def test_evaluation_ends_after_a_batch(how: str, tmp_path: Path) -> None:
    stop, ask = GracefulStop(tmp_path), KillAt("", 0)
    stage = {"validate": "validation"}.get(how, how)
    begun = []

    def raise_it(*_: Any) -> None:
        begun.append(1)
        signal.raise_signal(signal.SIGTERM)

    setattr(ask, f"on_{stage}_batch_start", raise_it)
    with pytest.raises(Stopped):
        getattr(trainer(callbacks=[ask, stop]), how)(Validated(), loader(SEQUENCES, 4))
    assert begun == [1]
    assert stop.stopped_by is signal.SIGTERM
    assert stop.checkpoint_path is None


def test_other_thread_is_left_as_it_is(tmp_path: Path) -> None:
    stop, errors = GracefulStop(tmp_path), []

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
    stop, seen = GracefulStop(tmp_path), KillAt("on_after_backward", 2, _interrupt_all)
    with pytest.raises(Stopped):
        trainer(callbacks=[seen, stop]).fit(TokenModule(), _worked())
    assert stop.checkpoint_path is not None


def _worked() -> Any:
    from tests.helpers import pad
    from trainkit.data.resumable import ResumableLoader

    return ResumableLoader(SEQUENCES, 4, num_workers=2, collate_fn=pad)


def _interrupt_all(_: Any) -> None:
    from multiprocessing import active_children

    for child in active_children():
        assert child.pid is not None
        os.kill(child.pid, signal.SIGINT)
    signal.raise_signal(signal.SIGINT)


# ---- several ranks -------------------------------------------------------------------


def _one_rank_is_asked(rank: int, world_size: int, folder: str, asked: int) -> Any:
    stop = GracefulStop(folder)
    callbacks: list[Any] = [stop]
    if rank == asked:
        callbacks.append(KillAt("on_after_backward", 1, raising(signal.SIGTERM)))
    each = trainer(
        callbacks=callbacks,
        strategy="ddp",
        devices=world_size,
        use_distributed_sampler=False,
    )
    try:
        each.fit(TokenModule(), rank_loader(SEQUENCES, 2, rank, world_size))
    except Stopped as stopped:
        return each.global_step, stopped.code, stop.checkpoint_path
    return None


@pytest.mark.parametrize("asked", [0, 1])
def test_all_ranks_stop_together(tmp_path: Path, asked: int) -> None:
    found = raise_rank_errors(run_ranks(_one_rank_is_asked, 2, str(tmp_path), asked))
    (first, first_code, path), (second, code, other_path) = found
    assert first == second
    assert first in (2, 3)
    assert path == other_path == str(tmp_path / "last.ckpt")
    assert (first_code, code) == (143, 0)  # Lightning kills the first one for another's


def _evaluate_unevenly(rank: int, world_size: int, how: str, asked: bool) -> Any:
    """The first rank has two batches and the second six."""
    stop, begun = GracefulStop(), []

    def begin(*_: Any) -> None:
        begun.append(1)
        if asked and len(begun) == 2:
            signal.raise_signal(signal.SIGTERM)

    ask = KillAt("", 0)
    stage = {"validate": "validation"}.get(how, how)
    setattr(ask, f"on_{stage}_batch_start", begin)
    each = trainer(
        callbacks=[ask, stop],
        strategy="ddp",
        devices=world_size,
        use_distributed_sampler=False,
    )
    share = SEQUENCES[:4] if rank == 0 else SEQUENCES[:12]
    try:
        getattr(each, how)(Validated(), loader(share, 2))
    except Stopped as stopped:
        return len(begun), stopped.code
    return len(begun), None


EVALUATIONS = ("validate", "test", "predict")


def _evaluate_all(rank: int, world_size: int) -> Any:
    found = {
        how: _evaluate_unevenly(rank, world_size, how, False) for how in EVALUATIONS
    }
    return {**found, "asked": _evaluate_unevenly(rank, world_size, "predict", True)}


@pytest.fixture(scope="module")
def evaluated() -> Any:
    return raise_rank_errors(run_ranks(_evaluate_all, 2))


@pytest.mark.parametrize("how", EVALUATIONS)
def test_ranks_may_evaluate_different_numbers_of_batches(
    evaluated: Any, how: str
) -> None:
    assert [each[how] for each in evaluated] == [(2, None), (6, None)]


def test_each_rank_ends_an_evaluation_by_its_own_signal(evaluated: Any) -> None:
    assert [each["asked"] for each in evaluated] == [(2, 143), (2, 143)]
