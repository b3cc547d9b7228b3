"""The other ranks of a run, the private names that it needs, and `train.log`."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import WandbLogger
from rich.console import Console
from rich.progress import Progress
from tqdm import tqdm

from tests.helpers import trainer
from trainkit.cli import _compat
from trainkit.cli.errors import TrainingFailed
from trainkit.cli.runs import ranks
from trainkit.cli.runs.ranks import ranks_of_one_run
from trainkit.cli.runs.screen_log import _Shown, screen_log


def with_rank(program: str) -> tuple[Trainer, subprocess.Popen[bytes]]:
    """A Trainer whose launcher has started one process."""
    two = trainer(devices=2, strategy="ddp")
    process = subprocess.Popen([sys.executable, "-c", program])
    two.strategy.launcher.procs.append(process)  # type: ignore[union-attr]
    return two, process


def test_they_are_waited_for_and_the_environment_is_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    two, process = with_rank("import time; time.sleep(0.2)")
    with ranks_of_one_run(two):
        monkeypatch.setenv("MASTER_PORT", "2")
        monkeypatch.setenv("LOCAL_RANK", "0")
    assert process.returncode == 0
    assert os.environ["MASTER_PORT"] == "1"
    assert "LOCAL_RANK" not in os.environ  # or the next run would start no ranks


def test_one_that_fails_fails_the_run() -> None:
    two, _ = with_rank("raise SystemExit(3)")
    said = r"another rank failed; exit statuses: \[3\]"
    with pytest.raises(TrainingFailed, match=said), ranks_of_one_run(two):
        pass


def test_after_an_error_one_that_hangs_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ranks, "_TO_END_AFTER_AN_ERROR", 0.1)
    two, process = with_rank("import time; time.sleep(600)")
    with pytest.raises(ZeroDivisionError), ranks_of_one_run(two):
        raise ZeroDivisionError
    assert process.poll() is not None


def test_a_run_without_other_ranks_leaves_the_environment_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They may be torchrun's, which started this process too."""
    with ranks_of_one_run(trainer()):
        monkeypatch.setenv("MASTER_PORT", "3")
    assert os.environ["MASTER_PORT"] == "3"


# ---- private names of Lightning and wandb: what each of them is today ----------------


def test_the_run_of_a_logger(private_wandb: Path) -> None:
    logger = WandbLogger(offline=True)
    assert _compat.run_of(logger) is None  # and asking made none
    run: Any = logger.experiment
    assert _compat.run_of(logger) is run
    assert not _compat.is_finished(run)
    run.finish()
    assert _compat.is_finished(run)
    _compat.without_run(logger)["id"] = "mine"
    run = logger.experiment
    assert (run.id, logger.version) == ("mine", "mine")
    run.finish()


@pytest.mark.parametrize("how", [{}, {"strategy": "ddp", "devices": 2}])
def test_ranks_are_taken_over_and_lightning_watches_none(how: dict[str, Any]) -> None:
    alone: Any = trainer(**how)
    assert _compat.take_over_ranks(alone) == []
    if how:
        process = subprocess.Popen([sys.executable, "-c", ""])
        alone.strategy.launcher.procs.append(process)
        assert _compat.take_over_ranks(alone) == [process]
        assert _compat.take_over_ranks(alone) == []
        process.wait(240)


# ---- `train.log` by itself -----------------------------------------------------------


def test_it_has_what_was_printed_warned_and_logged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "train.log"
    handler = logging.StreamHandler(sys.stdout)
    mine = logging.getLogger("mine")
    mine.propagate = False  # other tests may have left handlers of closed streams
    mine.addHandler(handler)
    try:
        with screen_log() as log:
            print("before it is opened")
            log.open(path)
            log.open(path)
            print("to stdout")
            at_once = path.read_text().splitlines()  # a run that is killed leaves them
            assert at_once == ["before it is opened", "to stdout"]
            print("to stderr", file=sys.stderr)
            mine.error("logged")
            for number in range(1000):
                sys.stderr.write(f"\r{number} of 1000")
            print("\n\x1b[1mbold\x1b[0m", file=sys.stderr)
            print("without an end", end="")
            log.write("\nonly in the file\n")
            print("of another system", end="\r\n")
        assert handler.stream is sys.stdout  # again
    finally:
        mine.removeHandler(handler)
    print("after it was closed")
    found = path.read_text().splitlines()
    assert found == [
        *("before it is opened", "to stdout", "to stderr", "logged", "bold"),
        *("without an end", "only in the file", "of another system"),
    ]
    shown = capsys.readouterr()
    assert "only in the file" not in shown.out + shown.err
    assert "\x1b[1mbold" in shown.err  # the screen is as it would be


def test_it_is_appended_to_that_of_an_earlier_run(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text("an earlier run\n")
    with screen_log() as log:
        log.open(path)
        print("resumed")
    assert path.read_text() == "an earlier run\nresumed\n"


def test_a_log_that_is_not_opened_leaves_nothing(tmp_path: Path) -> None:
    before = sys.stdout, sys.stderr
    with screen_log() as log:
        print("a mistake")
        assert sys.stdout is not before[0]
    log.open(tmp_path / "train.log")  # too late
    assert not list(tmp_path.iterdir())
    assert (sys.stdout, sys.stderr) == before


@pytest.mark.parametrize("num_bars", [1, 2])
def test_a_bar_of_rich_leaves_what_is_printed_above_it_and_its_end(
    num_bars: int, tmp_path: Path
) -> None:
    path = tmp_path / "train.log"
    out = io.StringIO()
    with screen_log() as log:
        log.open(path)
        print("before")
        stream = _Shown(out, log)
        console = Console(file=stream, force_terminal=True, width=80)  # type: ignore[arg-type]
        with Progress(console=console, auto_refresh=False) as bar:
            tasks = [bar.add_task(f"bar {n}", total=50) for n in range(num_bars)]
            for number in range(50):
                for task in tasks:
                    bar.advance(task)
                bar.refresh()
                if number == 20:
                    bar.print("between")
        print("after")
    lines = path.read_text().splitlines()
    others = [line for line in lines if "bar" not in line]
    assert others == ["before", "between", "after"]
    assert out.getvalue().count("bar 0") > 50  # the control: so many were drawn
    assert len(lines) <= 3 + 2 * num_bars
    assert "100%" in lines[-2]


def test_a_bar_of_tqdm_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    with screen_log() as log:
        log.open(path)
        print("before")
        for _ in tqdm(range(9), mininterval=0, file=sys.stderr, ncols=60):
            pass
        print("after")
    assert path.read_text().splitlines() == ["before", "after"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_worker_does_not_write_to_the_file(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    with screen_log() as log:
        log.open(path)
        print("one")
        child = os.fork()
        if child == 0:
            log.write("of the worker\n")
            log.close()
            os._exit(0)
        os.waitpid(child, 0)
        print("two")
    assert path.read_text() == "one\ntwo\n"


def test_a_file_that_cannot_be_written_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with screen_log() as log:
        log.open(tmp_path / "missing" / "train.log")
        print("goes on")
    shown = capsys.readouterr()
    assert shown.out == "goes on\n"
    assert shown.err.count("train.log: is not written") == 1
