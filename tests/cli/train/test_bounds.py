"""How a run begins and ends: what goes on leaves it as it was, and signals are told."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.training import (
    OPTIMIZED,
    SMALL,
    killer,
    own_option,
    run_dirs,
    summary_of,
    the_run,
    train,
)
from trainkit.cli.errors import Interrupted
from trainkit.cli.runs.folder import RunFolder, only_one
from trainkit.cli.train.job import _leave
from trainkit.lit.front.exact_resume import ExactResume
from trainkit.lit.logs.metrics_csv import MetricsCSVLogger

TEXTS = ("config.yaml", "overrides.yaml", "summary.json", "metrics.csv")
LAST = 7
"""The last batch of the two steps; a validation follows it."""


def texts(run: Path) -> dict[str, str]:
    return {name: (run / name).read_text() for name in TEXTS}


def go_on(*overrides: str, at: Path | None = None) -> int:
    """From the newest run, or the one in a given folder, which is found sooner."""
    where = at / "checkpoints" / "last.ckpt" if at else "last"
    return train(f"ckpt_path={where}", *overrides, small=[])


def test_what_trains_no_step_leaves_the_run_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train() == 0
    run = the_run(tmp_path)
    before = texts(run)

    def is_refused(status: int, text: str) -> bool:
        shown = capsys.readouterr().err
        assert text in shown
        assert len(shown.splitlines()) <= 2
        return status == 2 and texts(run) == before

    longer = "trainer.max_steps=3"
    status = go_on(longer, "model.d_model=16", at=run)
    assert is_refused(status, "size mismatch for token.weight")
    with only_one(run, what="a run"):  # it is under way
        assert is_refused(go_on(longer, at=run), "paths.run_dir: ")
    (tmp_path / "no.ckpt").write_text("this is no checkpoint")
    status = train("ckpt_path=no.ckpt")
    assert is_refused(status, "must be a readable checkpoint, received ")
    cut_off = (run / "checkpoints" / "last.ckpt").read_bytes()[:-100]
    (tmp_path / "no.ckpt").write_bytes(cut_off)
    assert is_refused(train("ckpt_path=no.ckpt"), "no.ckpt, which is damaged or no")
    assert run_dirs(tmp_path) == [run], "what was refused has no folder"
    summary = (run / "summary.json").read_text()
    (run / "summary.json").write_text(summary[:9])
    before = texts(run)
    assert is_refused(go_on(longer), "summary.json: must be as a run writes it, and is")
    (run / "summary.json").write_text(summary)
    before = texts(run)
    capsys.readouterr()
    for words in ([], ["trainer.max_steps=1"]):  # it has finished, and says so
        assert go_on(*words, at=run) == 0
        shown = capsys.readouterr().out
        assert "the run had finished after 2 optimizer steps" in shown
        assert "with a larger trainer.max_steps, max_epochs or max_time" in shown
        assert texts(run) == before
    # One that came to nothing is not the last; and no change is inherited.
    assert go_on(longer, "trainer.accumulate_grad_batches=2") == 0
    assert "2 x accumulation 2" in capsys.readouterr().out
    assert summary_of(run)["steps"] == 3
    assert texts(run) != before  # the control


def test_files_of_ones_own_need_not_be_named_again(tmp_path: Path) -> None:
    """Nor the root among them, if the run is; "last" is looked for under its name."""
    groups = tmp_path / "my conf"
    own_option(groups, "model", f"{OPTIMIZED}\nwidth: 3\n")
    (groups / "mine.yaml").write_text("defaults: [train, _self_]\nname: my\n")
    named = ["--config-dir=my conf", "--config-name=mine"]
    words = [word for word in SMALL if not word.startswith("model.")]
    words += ["model=mine", "optimizer=none", "scheduler=none"]
    assert train(*named, *words, small=[]) == 0
    run = the_run(tmp_path)
    assert run.parent.name == "my"
    for steps, again, at in ((3, [], run), (4, named, None)):
        assert go_on(f"trainer.max_steps={steps}", *again, at=at) == 0
        assert summary_of(run)["steps"] == steps


@pytest.fixture
def died() -> Iterator[list[int]]:
    """What reached the handlers of before the run: what would end a process."""
    found: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {
        each: signal.signal(each, lambda number, _: found.append(number))
        for each in numbers
    }
    ours = [signal.getsignal(each) for each in numbers]
    yield found
    assert [signal.getsignal(each) for each in numbers] == ours  # given back
    for each, handler in before.items():
        signal.signal(each, handler)


def status_of(*words: str) -> Any:
    """The status with which a training ends, or by which it leaves."""
    try:
        return train(*words)
    except SystemExit as end:
        return end.code or "left with 0"


class LateLogger(MetricsCSVLogger):
    """Gets the signals while it is closed, as a tracker that uploads."""

    signals: Any = ()

    def finalize(self, status: str) -> None:
        for number in self.signals:
            signal.raise_signal(number)
        super().finalize(status)


LATE = "logger.csv._target_=tests.cli.train.test_bounds.LateLogger"
ONE_BATCH = """
trainer.max_steps=-1 trainer.max_epochs=2 trainer.limit_train_batches=1 scheduler=none
trainer.val_check_interval=1 trainer.accumulate_grad_batches=1
""".split()
TERM, INT = signal.SIGTERM, signal.SIGINT
FINISHED, INTERRUPTED = ("finished", 2), ("interrupted", 1)
AFTER_A_BATCH = "on_train_batch_end"


@pytest.mark.parametrize(
    ("words", "signals", "status", "how"),
    [
        # after the last step; an epoch of one batch is the last one as well,
        ([killer(AFTER_A_BATCH, LAST)], [], 0, FINISHED),
        ([killer("on_fit_end", LAST, "SIGINT")], [], 0, FINISHED),
        ([killer(AFTER_A_BATCH, 1), *ONE_BATCH], [], 0, FINISHED),
        ([killer(AFTER_A_BATCH, 0), *ONE_BATCH], [], 143, INTERRUPTED),  # the control
        # while loggers are closed; a sweep's server stops a poor trial at its end, when
        # its rows arrive; the others of a multirun are not begun.
        ([LATE], [TERM], 0, FINISHED),
        ([LATE], [INT, INT], 130, FINISHED),
        (["-m", "seed=1,2", LATE], [TERM], 143, FINISHED),
        # The control: it was interrupted before, and a second stop does not hide that.
        ([LATE, killer(AFTER_A_BATCH, 3)], [TERM], 143, INTERRUPTED),
    ],
)
def test_a_stop_after_the_last_step_finds_a_finished_run(
    words: list[str],
    signals: list[signal.Signals],
    status: int,
    how: tuple[str, int],
    died: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: Any,
) -> None:
    monkeypatch.setattr(LateLogger, "signals", signals)
    assert status_of(*words) == status
    if words == [LATE] and not status:
        assert "SIGTERM: training is over" in capfd.readouterr().err
    assert died == []
    run = the_run(tmp_path)
    found = summary_of(run)
    assert (found["status"], found["steps"]) == how
    assert (run / "checkpoints" / "last.ckpt").exists()


@pytest.mark.parametrize(
    ("number", "sweep", "status"),
    [
        (signal.SIGINT, None, 130),
        (signal.SIGTERM, None, 143),
        (signal.SIGINT, "sweep", 130),
        (signal.SIGTERM, "sweep", 0),  # that is how a sweep stops a poor trial
    ],
)
def test_the_status_says_who_stopped_it(
    number: signal.Signals,
    sweep: str | None,
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("WANDB_SWEEP_ID", raising=False)
    if sweep is not None:
        monkeypatch.setenv("WANDB_SWEEP_ID", sweep)
    stop = ExactResume()
    stop.stopped_by, stop.checkpoint_path = number, "/a b/last.ckpt"
    with pytest.raises(SystemExit) as left:
        _leave(stop, RunFolder(tmp_path), is_first=True)
    assert left.value.code == status
    assert isinstance(left.value, Interrupted) == (status != 0)
    said = capsys.readouterr().out
    _, resume, line = said.partition(f"stopped by {number.name}; to resume: ")
    assert resume
    assert line.startswith(f"cd {shlex.quote(str(Path.cwd()))} && ")
    assert line.endswith(" train 'ckpt_path=/a b/last.ckpt'\n")


def test_another_rank_leaves_the_word_to_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stop = ExactResume()
    stop.stopped_by = signal.SIGTERM
    with pytest.raises(SystemExit) as left:
        _leave(stop, RunFolder(tmp_path), is_first=False)
    assert left.value.code == 0
    assert capsys.readouterr().out == ""
