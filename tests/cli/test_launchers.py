"""Many trainings at once: Hydra's launchers and Optuna's sweeper, with trainkit's groups."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from tests.cli.training import run_dirs, summary_of, train

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["trainkit"])


@pytest.mark.parametrize(
    ("launcher", "package", "options"),
    [
        ("joblib", "hydra_plugins.hydra_joblib_launcher", ["hydra.launcher.n_jobs=2"]),
        (
            "submitit_local",
            "hydra_plugins.hydra_submitit_launcher",
            ["hydra.launcher.timeout_min=5"],
        ),
        (
            "ray",
            "hydra_plugins.hydra_ray_launcher",
            ["+hydra.launcher.ray.init.num_cpus=2"],
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::Warning")  # of packages that only launch
def test_every_launcher_runs_all_of_them(
    launcher: str, package: str, options: list[str], tmp_path: Path
) -> None:
    pytest.importorskip(package)
    words = ["-m", f"hydra/launcher={launcher}", *options, "seed=1,2"]
    assert train(*words) == 0
    runs = run_dirs(tmp_path / "outputs")
    assert [summary_of(run)["status"] for run in runs] == ["finished"] * 2
    losses = {summary_of(run)["metrics"]["val/loss"] for run in runs}
    assert len(losses) == 2


def test_submitit_slurm_is_configured(capsys: pytest.CaptureFixture[str]) -> None:
    """There is no SLURM to run it on."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    words = ["hydra/launcher=submitit_slurm", "hydra.launcher.nodes=2", "trainer=slurm"]
    assert train("--cfg=hydra", "-phydra.launcher", *words, small=[]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["nodes"] == 2
    assert shown["_target_"].endswith("SlurmLauncher")


@pytest.mark.filterwarnings("ignore::Warning")
def test_optuna_searches_for_the_metric(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    assert train("-m", "hparams_search=optuna", "hydra.sweeper.n_trials=3") == 0
    runs = run_dirs(tmp_path)
    losses = [summary_of(run)["metrics"]["val/loss"] for run in runs]
    rates = [run_rate(run) for run in runs]
    assert len(set(rates)) == 3
    assert all(0.0001 <= rate <= 0.01 for rate in rates)
    (results,) = tmp_path.rglob("optimization_results.yaml")
    best = yaml.safe_load(results.read_text())
    assert best["best_value"] == pytest.approx(min(losses))


def run_rate(run: Path) -> float:
    return yaml.safe_load((run / "config.yaml").read_text())["optimizer"]["lr"]
