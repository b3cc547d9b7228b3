"""How the command leaves when a training was stopped."""

from __future__ import annotations

import shlex
import signal
from pathlib import Path

import pytest

from trainkit.cli.errors import Interrupted
from trainkit.cli.runs.folder import RunFolder
from trainkit.cli.train.job import _leave
from trainkit.lit.resume.graceful_stop import GracefulStop

STATUSES = [
    (signal.SIGINT, None, 130),
    (signal.SIGTERM, None, 143),
    (signal.SIGINT, "sweep", 130),
    (signal.SIGTERM, "sweep", 0),  # that is how a sweep stops a poor trial
]


@pytest.mark.parametrize(("number", "sweep", "status"), STATUSES)
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
    stop = GracefulStop(tmp_path)
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
    stop = GracefulStop(tmp_path)
    stop.stopped_by = signal.SIGTERM
    with pytest.raises(SystemExit) as left:
        _leave(stop, RunFolder(tmp_path), is_first=False)
    assert left.value.code == 0
    assert capsys.readouterr().out == ""
