"""`ckpt_path=last` and its kin: which run goes on, and with which arguments."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trainkit import TrainkitError
from trainkit.cli.runs.folder import RunFolder, remember_wandb_run
from trainkit.cli.runs.resume import as_trial, expand, key_of, quoted
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


def test_without_it_nothing_changes() -> None:
    assert expand(["seed=1", "-m"]) == ["seed=1", "-m"]
    assert expand(["seed=1", "ckpt_path=null"]) == ["seed=1"]


def test_the_newest_run_goes_on_as_it_was_configured() -> None:
    made("a", ["seed=1"], at=200)
    folder = made("b", ["seed=2", "debug=default", "ckpt_path=x"], at=300)
    made("c", ["seed=3"], at=100)
    assert expand(["ckpt_path=last"]) == [
        "seed=2",
        "debug=default",
        f"hydra.run.dir='{folder.path}'",
        f"ckpt_path='{folder.path}/checkpoints/last.ckpt'",
    ]


def test_what_is_given_now_goes_before_what_was_given_then() -> None:
    made("a", ["seed=1", "trainer.max_steps=5", "+x=1"], at=1)
    words = expand(["ckpt_path=last", "trainer.max_steps=9", "++x=2"])
    assert words[:3] == ["seed=1", "trainer.max_steps=9", "++x=2"]
    # It was not there before the run added it.
    assert expand(["ckpt_path=last", "x=2"])[2] == "++x=2"


def test_a_checkpoint_in_a_runs_folder_continues_that_run() -> None:
    folder = made("a", ["seed=1"], at=1, checkpoints=("last.ckpt", "step=5.ckpt"))
    made("b", ["seed=2"], at=2)
    words = expand([f"ckpt_path={folder.checkpoints}/step=5.ckpt"])
    assert words[0] == "seed=1"
    assert words[-1] == f"ckpt_path='{folder.checkpoints}/step=5.ckpt'"


def test_a_checkpoint_elsewhere_starts_a_run_of_its_own() -> None:
    Path("some where").mkdir()
    path = Path("some where/it's.ckpt")
    path.write_text("")
    assert expand(["seed=1", f"ckpt_path='{path}'"]) == [
        "seed=1",
        f"ckpt_path={quoted(path.absolute())}",
    ]


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


def test_where_it_looks_follows_the_configuration() -> None:
    made("a", ["seed=1"], at=1)
    with pytest.raises(TrainkitError, match=r"no run in outputs/other"):
        expand(["ckpt_path=last", "name=other"])


def test_a_folder_that_is_given_is_where_it_looks() -> None:
    made("newer", ["seed=1"], at=300)
    here = RunFolder("here")
    here.write_start({}, ["seed=2", "paths.run_dir=here"])
    here.checkpoints.mkdir()
    (here.checkpoints / "last.ckpt").write_text("")
    assert expand(["paths.run_dir=here", "ckpt_path=last"]) == [
        "seed=2",
        "paths.run_dir=here",
        f"hydra.run.dir='{here.path}'",
        f"ckpt_path='{here.path}/checkpoints/last.ckpt'",
    ]
    with pytest.raises(TrainkitError, match=r"no run in outputs\. "):
        expand(["paths.run_dir=outputs", "ckpt_path=last"])


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["ckpt_path=last"], "ckpt_path=last: there is no run in"),
        (["ckpt_path=gone.ckpt"], "received 'gone.ckpt', which does not exist"),
        (["ckpt_path=last", "-m"], "resumes one run"),
        (["ckpt_path=auto", "-m"], "resumes one run"),
    ],
)
def test_what_cannot_go_on_is_refused(words: list[str], text: str) -> None:
    with pytest.raises(TrainkitError, match=text):
        expand(words)


AUTO = "ckpt_path=auto"


def of_torchrun(monkeypatch: pytest.MonkeyPatch, count: int, job: str = "job") -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", job)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(count))


def test_auto_begins_a_run_and_goes_on_with_it_by_the_same_command() -> None:
    assert expand(["seed=1", AUTO]) == ["seed=1"]
    folder = made("a", ["seed=1", AUTO], at=1)
    assert expand(["seed=1", AUTO]) == [
        "seed=1",
        f"hydra.run.dir='{folder.path}'",
        f"ckpt_path='{folder.path}/checkpoints/last.ckpt'",
    ]


@pytest.mark.parametrize("count", [0, 2])
def test_auto_knows_the_folder_of_the_job_on_every_node(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes count restarts for themselves: https://github.com/pytorch/pytorch/issues/108158"""
    made("of_another_job", ["seed=2"], at=9)
    of_torchrun(monkeypatch, count)
    where = Path("outputs/code_lm/torchrun-job").absolute()
    assert expand(["seed=1", AUTO]) == ["seed=1", f"hydra.run.dir='{where}'"]
    made("torchrun-job", ["seed=1"], at=1)
    assert expand(["seed=1", AUTO])[-1] == f"ckpt_path='{where}/checkpoints/last.ckpt'"


def test_auto_takes_a_folder_that_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    of_torchrun(monkeypatch, 1)
    folder = made("a", ["seed=1"], at=1)
    given = f"paths.run_dir={folder.path}"
    assert expand([given, AUTO])[-1].startswith(f"ckpt_path='{folder.path}")
    new = Path("new").absolute()
    words = [f"paths.run_dir={new}"]
    assert expand([*words, AUTO]) == [*words, f"hydra.run.dir='{new}'"]


def test_auto_without_a_checkpoint_begins_again_in_the_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    of_torchrun(monkeypatch, 1)
    folder = made("torchrun-job", ["seed=1"], at=1, checkpoints=())
    assert expand(["seed=1", AUTO]) == ["seed=1", f"hydra.run.dir='{folder.path}'"]
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
    remember_wandb_run(str(own.path), "mine")
    assert as_trial(["seed=2", AUTO])[-1] == (
        f"ckpt_path='{own.path}/checkpoints/last.ckpt'"
    )


def test_a_secret_has_to_be_given_again() -> None:
    made("a", ["+hub.token=<redacted>", "seed=1"], at=1)
    with pytest.raises(TrainkitError, match=r"hub\.token: is a secret"):
        expand(["ckpt_path=last"])
    assert "+hub.token=x" in expand(["ckpt_path=last", "+hub.token=x"])


def test_keys_of_overrides() -> None:
    words = ["a=1", "+a=1", "++a.b=1", "~a", "db@x=1"]
    assert [key_of(word) for word in words] == ["a", "a", "a.b", "a", "db"]


def test_a_folder_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.write_start({"a": {"b": [1, None]}}, ["x=1"])
    assert folder.overrides() == ["x=1"]
    assert folder.read_summary() is None
    folder.write_summary({"loss": 1.5})
    assert folder.read_summary() == {"loss": 1.5}
    names = sorted(each.name for each in folder.path.iterdir())
    assert names == ["config.yaml", "overrides.yaml", "summary.json"]
