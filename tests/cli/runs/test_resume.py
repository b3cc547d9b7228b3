"""`ckpt_path=last` and its kin: which run goes on, and with which arguments."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from tests.startup import ended
from trainkit import TrainkitError
from trainkit.cli.runs.folder import RunFolder, only_one
from trainkit.cli.runs.resume import as_trial, expand, quoted
from trainkit.config import register

register()


def made(name: str, overrides: list[str], *, at: float, checkpoints=("last.ckpt",)):
    folder = RunFolder(Path("outputs/code_lm") / name)
    folder.write_start({"a": 1}, overrides)
    os.utime(folder.path / RunFolder.OVERRIDES, (at, at))
    folder.checkpoints.mkdir()
    for each in checkpoints:
        (folder.checkpoints / each).write_text("")
    return folder


THERE = "/there"
"""Stands for the folder of the test."""


def resumed(name: str, checkpoint: str = "last.ckpt") -> list[str]:
    """The words that name a run's folder and its checkpoint."""
    folder = f"{THERE}/outputs/code_lm/{name}"
    where = f"{folder}/checkpoints/{checkpoint}"
    return [f"hydra.run.dir='{folder}'", f"ckpt_path='{where}'"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["seed=1", "-m"], ["seed=1", "-m"]),
        (["seed=1", "ckpt_path=null"], ["seed=1"]),
        # The newest run goes on as it was configured, but for what is given now;
        (["ckpt_path=last"], ["seed=2", "+x=1", "debug=default", *resumed("b")]),
        (
            ["ckpt_path=last", "seed=9", "++x=2"],
            ["debug=default", "seed=9", "++x=2", *resumed("b")],
        ),
        # `x` was not there before the run added it.
        (
            ["ckpt_path=last", "x=2"],
            ["seed=2", "debug=default", "++x=2", *resumed("b")],
        ),
        # A checkpoint in a run's folder continues that run, elsewhere it begins one.
        (
            ["ckpt_path=outputs/code_lm/a/checkpoints/step=5.ckpt"],
            ["seed=1", *resumed("a", "step=5.ckpt")],
        ),
        (["ckpt_path=outputs/code_lm/a"], ["seed=1", *resumed("a")]),
        (
            ["seed=1", "ckpt_path='some where/it\\'s.ckpt'"],
            ["seed=1", "ckpt_path={elsewhere}"],
        ),
        # In a folder that is given, that run is the newest.
        (
            ["paths.run_dir=outputs/code_lm/a", "ckpt_path=last"],
            ["seed=1", "paths.run_dir=outputs/code_lm/a", *resumed("a")],
        ),
    ],
)
def test_which_run_goes_on_and_with_which_words(
    words: list[str], expected: list[str]
) -> None:
    made("a", ["seed=1"], at=200, checkpoints=("last.ckpt", "step=5.ckpt"))
    made("b", ["seed=2", "+x=1", "debug=default", "ckpt_path=x"], at=300)
    made("c", ["seed=3"], at=100)
    failed = made("d", ["seed=4"], at=400, checkpoints=())
    failed.write_json(failed.SUMMARY, {"status": "failed"})  # and cannot go on
    Path("some where").mkdir()
    elsewhere = Path("some where/it's.ckpt")
    elsewhere.touch()
    place = quoted(elsewhere.absolute())
    here = str(Path().absolute())
    known = [each.replace("{elsewhere}", place) for each in expected]
    assert expand(words) == [each.replace(THERE, here) for each in known]


def test_a_run_of_an_experiment_on_the_search_path_goes_on() -> None:
    experiment = Path("elsewhere/experiment/mine.yaml")
    experiment.parent.mkdir(parents=True)
    experiment.write_text("# @package _global_\nname: code_lm\n")
    made("a", ["seed=1"], at=1)
    where = f"hydra.searchpath=[file://{Path('elsewhere').absolute()}]"
    words = expand([where, "experiment=mine", "ckpt_path=last"])
    assert words[0] == "seed=1"


def test_a_run_without_a_checkpoint_starts_anew_in_its_folder(
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = made("a", ["seed=1"], at=1, checkpoints=())
    assert expand(["ckpt_path=last"]) == ["seed=1", f"hydra.run.dir='{folder.path}'"]
    assert "no checkpoint yet, so it starts anew" in capsys.readouterr().out


def test_other_checkpoints_serve_where_there_is_no_last() -> None:
    folder = made("a", [], at=1, checkpoints=("step=1.ckpt", "step=2.ckpt"))
    os.utime(folder.checkpoints / "step=1.ckpt", (10, 10))
    assert folder.newest_checkpoint() == folder.checkpoints / "step=2.ckpt"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["ckpt_path=last", "name=other"], "there is no run in outputs/other"),
        (["ckpt_path=last", "paths.run_dir=outputs"], r"there is no run in outputs\. "),
        (["ckpt_path=gone.ckpt"], "received 'gone.ckpt', which does not exist"),
        (["ckpt_path=outputs/code_lm/b"], "code_lm/b', which has no checkpoint"),
        (["ckpt_path=outputs/code_lm/a/checkpoints"], "which is of no run"),
        (["ckpt_path=outputs/code_lm"], "code_lm', which is of no run"),
        (["ckpt_path=last", "-m"], "resumes one run"),
        (["ckpt_path=auto", "-m"], "resumes one run"),
    ],
)
def test_what_cannot_go_on_is_refused(words: list[str], text: str) -> None:
    made("a", ["seed=1"], at=1)
    made("b", ["seed=1"], at=0, checkpoints=())
    with pytest.raises(TrainkitError, match=text):
        expand(words)


AUTO = "ckpt_path=auto"


GIVEN = "paths.run_dir=outputs/code_lm/a"


@pytest.mark.parametrize(
    ("runs", "attempt", "words", "expected"),
    [
        # The same command begins a run, and goes on with it.
        ({}, None, ["seed=1"], ["seed=1"]),
        ({"a": 1}, None, ["seed=1"], ["seed=1", *resumed("a")]),
        # The folder of the job comes first, on every node: they count restarts for
        # themselves, https://github.com/pytorch/pytorch/issues/108158
        ({"other": 1}, 0, ["seed=1"], ["seed=1", resumed("torchrun-job")[0]]),
        ({"other": 1}, 2, ["seed=1"], ["seed=1", resumed("torchrun-job")[0]]),
        ({"other": 1, "torchrun-job": 1}, 0, [], ["seed=1", *resumed("torchrun-job")]),
        ({"other": 1, "torchrun-job": 1}, 2, [], ["seed=1", *resumed("torchrun-job")]),
        ({"torchrun-job": 0}, 1, [], ["seed=1", resumed("torchrun-job")[0]]),
        # A folder that is given comes before it.
        ({"a": 1}, 1, [GIVEN], ["seed=1", GIVEN, *resumed("a")]),
        ({}, 1, [GIVEN], [GIVEN, resumed("a")[0]]),
        ({"a": -1}, 1, [GIVEN], [GIVEN, resumed("a")[0]]),  # somebody's checkpoint
    ],
)
def test_auto_begins_a_run_or_goes_on_with_it(
    runs: dict[str, int],
    attempt: int | None,
    words: list[str],
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if attempt is not None:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
    for name, number in runs.items():
        last = ("last.ckpt",) * abs(number)
        folder = made(name, ["seed=1", AUTO], at=9, checkpoints=last)
        if number < 0:  # of no run
            (folder.path / folder.OVERRIDES).unlink()
    here = str(Path().absolute())
    assert expand([*words, AUTO]) == [each.replace(THERE, here) for each in expected]
    assert capsys.readouterr().out == ""  # each rank would say it


def test_auto_leaves_the_newest_trial_to_its_own_sweep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made("another_trial", ["seed=1"], at=1)
    monkeypatch.setenv("WANDB_SWEEP_ID", "sweep")
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    assert as_trial(["seed=2", AUTO]) == ["seed=2", AUTO]
    assert expand(["seed=2", AUTO]) == ["seed=2"]
    own = made("own_trial", ["seed=2"], at=2)
    files = own.path / "wandb/offline-run-20260131_120000-mine"
    files.mkdir(parents=True)
    (files / "run-mine.wandb").touch()
    assert as_trial(["seed=2", AUTO])[-1] == (
        f"ckpt_path='{own.path}/checkpoints/last.ckpt'"
    )


def test_a_secret_has_to_be_given_again() -> None:
    made("a", ["+hub.token=<redacted>", "seed=1"], at=1)
    with pytest.raises(TrainkitError, match=r"hub\.token: is a secret"):
        expand(["ckpt_path=last"])
    assert "+hub.token=x" in expand(["ckpt_path=last", "+hub.token=x"])


def test_a_folder_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.write_start({"a": {"b": [1, None]}}, ["x=1"])
    assert folder.overrides() == ["x=1"]
    assert folder.read_summary() == {}
    folder.write_json(folder.SUMMARY, {"loss": 1.5})
    assert folder.read_summary() == {"loss": 1.5}
    names = sorted(each.name for each in folder.path.iterdir())
    assert names == ["config.yaml", "overrides.yaml", "summary.json"]


TRIES = """
import sys
import time
from multiprocessing import get_context
from pathlib import Path
from trainkit.cli.runs.folder import only_one
with only_one(Path(sys.argv[1]), what="run"):
    pass
"""


def tries(folder: Path) -> subprocess.CompletedProcess[str]:
    return ended([sys.executable, "-c", TRIES, str(folder)], Path(), os.environ)


def test_a_second_process_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    """And so is the same one."""
    with only_one(tmp_path / "run", what="run"):
        refused = tries(tmp_path / "run")
        with pytest.raises(TrainkitError, match="run: .* is in use by another process"):
            with only_one(tmp_path / "run", what="run"):
                pass
    assert refused.returncode != 0
    assert "is in use by another process" in refused.stderr
    assert tries(tmp_path / "run").returncode == 0
    assert tries(tmp_path / "other").returncode == 0
    with only_one(tmp_path / "run", what="run"):
        pass


def test_a_system_without_such_locks_does_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSYS, "no locks")

    monkeypatch.setattr("filelock.FileLock.acquire", no_locks)
    with only_one(tmp_path, what="run"), only_one(tmp_path, what="run"):
        pass


def test_what_a_process_has_forked_does_not_hold_it(tmp_path: Path) -> None:
    """The workers of a loader outlive a run that was killed by seconds."""
    with only_one(tmp_path, what="run"):
        worker = get_context("fork").Process(
            target=time.sleep, args=(600,), daemon=True
        )
        worker.start()
    try:
        assert tries(tmp_path).returncode == 0
    finally:
        worker.kill()
        worker.join()
