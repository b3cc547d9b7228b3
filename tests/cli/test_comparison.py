"""The table after several runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra.types import RunMode
from omegaconf import OmegaConf

from trainkit.cli.comparison import Comparison, show, table
from trainkit.cli.runs.folder import RunFolder


def made(where: Path, name: str, loss: float | None, *words: str) -> RunFolder:
    run = RunFolder(where / name)
    run.write_start({}, words)
    if loss is not None:
        metrics = {"val/loss": loss}
        ended = {"metrics": metrics, "status": "finished", "steps": 4}
        run.write_json(run.SUMMARY, {"metric": "val/loss", **ended})
    return run


def names(lines: list[str]) -> list[str]:
    return [line.split()[0] for line in lines[1:]]


def test_the_best_comes_first_and_what_has_no_metric_last(tmp_path: Path) -> None:
    runs = [
        made(tmp_path, "none", None, "seed=1"),
        made(tmp_path, "high", 0.75, "seed=2"),
        made(tmp_path, "low", 0.25, "seed=3"),
    ]
    assert names(table(runs)) == ["low", "high", "none"]
    assert names(table(runs, maximizes=True)) == ["high", "low", "none"]


@pytest.mark.parametrize(("mode", "best"), [("min", "1"), ("max", "2")])
def test_a_multirun_is_ranked_by_its_mode(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], mode: str, best: str
) -> None:
    for name in "12":
        made(tmp_path, name, float(name))
    show(OmegaConf.create({"mode": mode, "hydra": {"sweep": {"dir": tmp_path}}}))
    assert names(capsys.readouterr().out.splitlines())[0] == best


def test_what_all_runs_share_is_no_column(tmp_path: Path) -> None:
    runs = [
        made(tmp_path, "0", 1.0, "accumulation=uniform", "name=x"),
        made(tmp_path, "1", 2.0, "accumulation=per_token", "name=x"),
    ]
    header, first, second = table(runs)
    assert header.split() == ["run", "accumulation", "training", "steps", "val/loss"]
    assert first.split() == ["0", "uniform", "finished", "4", "1"]
    assert second.split() == ["1", "per_token", "finished", "4", "2"]


def test_no_secret_waits_for_the_end_of_a_multirun(tmp_path: Path) -> None:
    """Hydra writes the words of the command line before its first job, which may be
    killed."""
    written = tmp_path / "multirun.yaml"
    written.write_text("hydra: {overrides: {task: ['+hub.token=abcdefgh', seed=1]}}\n")
    config = {"hydra": {"mode": RunMode.MULTIRUN, "sweep": {"dir": str(tmp_path)}}}
    Comparison().on_job_start(OmegaConf.create(config))
    assert "abcdefgh" not in written.read_text()
    assert "seed=1" in written.read_text()
    assert [each.name for each in tmp_path.iterdir()] == ["multirun.yaml"]


@pytest.mark.parametrize("place", ["absolute", "relative"])
def test_how_many_runs_failed_is_no_name_of_a_run(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    place: str,
) -> None:
    """Also those that failed before they had begun."""
    monkeypatch.chdir(tmp_path)
    folder = "." if place == "relative" else str(tmp_path)
    for name in "12":
        made(tmp_path, name, 1.0)
    config = OmegaConf.create({"mode": "min", "hydra": {"sweep": {"dir": folder}}})
    show(config)
    assert "runs failed" not in capsys.readouterr().out
    (tmp_path / "0").mkdir()
    for name in "02":
        (tmp_path / name / ".failed").touch()
    show(config)
    assert capsys.readouterr().out.endswith("\ntrainkit | 2 of 3 runs failed\n")
