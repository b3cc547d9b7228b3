"""Many trainings at once: Hydra's launchers, Optuna, and the table after them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from hydra.types import RunMode
from matplotlib import get_configdir
from omegaconf import OmegaConf

from tests.cli.training import SMALL, run_dirs, summary_of, train
from tests.environments import install
from tests.startup import CHILD_PATH, ended, forked
from trainkit.cli.comparison import Compared, Comparison, show, table
from trainkit.cli.runs.folder import RunFolder

ROOT = Path(__file__).parents[3]

LAUNCHERS = {
    "joblib": ["hydra.launcher.n_jobs=2"],
    "submitit_local": ["hydra.launcher.timeout_min=5"],
    "ray": [
        "+hydra.launcher.ray.init.num_cpus=1",
        "+hydra.launcher.ray.init.include_dashboard=false",
    ],
}
MODEL = """
from trainkit.recipes.code_lm import CodeLM

class Mine(CodeLM):
    def on_train_batch_start(self, batch, batch_idx):
        rate = self.trainer.optimizers[0].defaults["lr"]
        self.log("odd", float("nan") if rate == 8 else rate)
        if self.trainer.global_step == 1 and rate == 7:
            raise RuntimeError("seven is too much")
"""
"""A user's own, in the folder where the command is given."""


@pytest.fixture
def ray_folder() -> Iterator[str]:
    """Ray has sockets in it, whose names must be short."""
    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        yield f"+hydra.launcher.ray.init._temp_dir={folder}"


def launched(launcher: str, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    pytest.importorskip(f"hydra_plugins.hydra_{launcher.split('_')[0]}_launcher")
    (cwd / "my_model.py").write_text(MODEL)
    env = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
    env |= {"HOME": str(cwd), "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    env |= {"PYTHONPATH": CHILD_PATH, "TRAINKIT_ALLOW": "my_model"}
    env["RAY_worker_niceness"] = "0"  # by default 15: they starve beside busy loops
    env["MPLCONFIGDIR"] = get_configdir()  # with the cache of fonts, which takes long
    if launcher in ("joblib", "submitit_local"):  # ray knows its workers' numbers
        env |= forked()
    command = [Path(sys.executable).with_name("trainkit"), "train", "-m", *SMALL]
    command += [f"hydra/launcher={launcher}", *LAUNCHERS[launcher], *words]
    return ended(command, cwd, env, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher",
    [
        "joblib",
        pytest.param("submitit_local", marks=pytest.mark.environments),
        pytest.param("ray", marks=pytest.mark.environments),  # it starts a cluster
    ],
)
def test_every_launcher_runs_all_of_them_and_tells_what_failed(
    launcher: str, tmp_path: Path, ray_folder: str
) -> None:
    swept = ["optimizer.lr=0.001,7", "model._target_=my_model.Mine"]
    own = [ray_folder] if launcher == "ray" else []
    done = launched(launcher, *own, *swept, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "RuntimeError: seven is too much" in done.stderr
    good, bad = run_dirs(tmp_path / "outputs")
    assert summary_of(good)["status"] == "finished"
    assert summary_of(bad)["status"] == "failed"
    lines = done.stdout.splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("run  "))
    header, *rows = lines[start : start + 3]
    assert header.split() == ["run", "optimizer.lr", "training", "steps", "val/loss"]
    assert [row.split()[:4] for row in rows] == [
        ["0", "0.001", "finished", "2"],
        ["1", "7", "failed", "1"],
    ]


def test_submitit_slurm_is_configured(capsys: pytest.CaptureFixture[str]) -> None:
    """There is no SLURM to run it on."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    words = ["hydra/launcher=submitit_slurm", "hydra.launcher.nodes=2", "trainer=slurm"]
    assert train("--cfg=hydra", "-phydra.launcher", *words, small=[]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["nodes"] == 2
    assert shown["_target_"].endswith("SlurmLauncher")


@pytest.mark.environments
@pytest.mark.filterwarnings("ignore::Warning")  # Optuna's, of its own changes
def test_optuna_searches_for_the_metric(tmp_path: Path) -> None:
    own_optuna()
    assert train("-m", "hparams_search=optuna", "hydra.sweeper.n_trials=2") == 0
    runs = run_dirs(tmp_path)
    losses = [summary_of(run)["metrics"]["val/loss"] for run in runs]
    rates = {rate_of(run) for run in runs}
    assert len(rates) == 2
    assert all(0.0001 <= rate <= 0.01 for rate in rates)
    (results,) = tmp_path.rglob("optimization_results.yaml")
    best = yaml.safe_load(results.read_text())
    assert best["best_value"] == pytest.approx(min(losses))
    assert max(losses) > min(losses)


@pytest.mark.environments
@pytest.mark.filterwarnings("ignore::Warning")  # Optuna's, of its own changes
@pytest.mark.parametrize(
    ("rates", "trials"),
    # The rate of 7 fails, that of 8 ends with a metric of NaN.
    [("choice(0.001,7,8)", 3), ("choice(7,7.0)", 1)],
    ids=["some", "all"],
)
def test_optuna_goes_on_past_failed_trials_and_the_status_tells(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rates: str,
    trials: int,
) -> None:
    own_optuna()
    (tmp_path / "my_model.py").write_text(MODEL)
    monkeypatch.setenv("TRAINKIT_ALLOW", "my_model")
    words = ["hparams_search=optuna", f"hydra.sweeper.n_trials={trials}"]
    words += ["metric=odd", "hydra.sweeper.sampler.seed=5"]
    own = [f"optimizer.lr={rates}", "model._target_=my_model.Mine"]
    assert train("-m", *words, *own) == 1
    found = [(rate_of(run), summary_of(run)["status"]) for run in run_dirs(tmp_path)]
    assert len(found) == trials
    failed = [rate for rate, status in found if status == "failed"]
    assert set(failed) == {7}
    said = f"trainkit | {len(failed)} of {trials} runs did not finish\n"
    assert said in capsys.readouterr().out
    if "0.001" in rates:
        assert {rate for rate, _ in found} == {0.001, 7, 8}
        (results,) = tmp_path.rglob("optimization_results.yaml")
        best = yaml.safe_load(results.read_text())
        assert best["best_params"]["optimizer.lr"] == 0.001


@pytest.mark.environments
def test_optuna_works_in_an_environment_of_its_own(tmp_path: Path) -> None:
    """The tests above are skipped here, where `trainkit sweep` has a newer Optuna."""
    made = tmp_path / "venv"
    venv.create(made, symlinks=True)
    wanted = ["hydra-optuna-sweeper==1.3.0"]
    wanted += [f"{name}=={version(name)}" for name in ("hydra-core", "omegaconf")]
    assert install(*wanted, python=str(made / "bin" / "python"))
    (site,) = made.glob("lib/python*/site-packages")
    lent = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    (site / "lent.pth").write_text("\n".join([str(ROOT), *sorted(lent)]) + "\n")
    command = [made / "bin" / "python", "-m", "pytest", "-q", __file__]
    command += ["-m", "environments or not environments", "tests/config/test_conf.py"]
    command += ["-k", "optuna and not works_in"]
    done = ended(command, ROOT, os.environ, timeout=500)
    assert done.returncode == 0, done.stdout
    *_, last = done.stdout.splitlines()
    assert re.match(r"4 passed, \d+ deselected", last), done.stdout  # and none skipped


def own_optuna() -> None:
    """Skip where Hydra's sweeper is not, or stands beside a newer Optuna."""
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    if not version("optuna").startswith("2."):
        pytest.skip("the extra `optuna` needs an environment of its own")


def rate_of(run: Path) -> float:
    return yaml.safe_load((run / "config.yaml").read_text())["optimizer"]["lr"]


# ---- the table after several runs ----------------------------------------------------


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
    config = OmegaConf.create({"mode": mode, "hydra": {"sweep": {"dir": tmp_path}}})
    show(config, Compared())
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


def test_how_many_runs_did_not_finish_is_no_name_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made(tmp_path, "0", 1.0)
    config = OmegaConf.create({"mode": "min", "hydra": {"sweep": {"dir": tmp_path}}})
    show(config, Compared())
    assert "did not finish" not in capsys.readouterr().out
    made(tmp_path, "1", None)
    show(config, compared := Compared())
    assert compared.num_unfinished == 1
    said = capsys.readouterr().out
    assert said.endswith("\ntrainkit | 1 of 2 runs did not finish\n")
