"""`hydra/sweeper=wandb` without a server: W&B's engine, and Hydra's launcher."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from tests.cli.training import run_dirs, summary_of, train
from trainkit.cli.sweep.command import hydra_text

RATES = "optimizer.lr=tag(log,interval(1e-4,1e-2))"
WORDS = ["-m", "hydra/sweeper=wandb"]
MODEL = """
from trainkit.recipes.code_lm import CodeLM

class Mine(CodeLM):
    def on_train_batch_start(self, batch, batch_idx):
        rate = self.trainer.optimizers[0].defaults["lr"]
        self.log("odd", float("nan") if rate == 8 else rate)
        if self.trainer.global_step == 1 and (rate == 7 or rate > 8):
            raise RuntimeError("seven is too much")
"""


@pytest.fixture(autouse=True)
def elsewhere(
    no_account: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sweeps")
    monkeypatch.setattr(sys, "argv", ["trainkit"])
    monkeypatch.setenv("TRAINKIT_ALLOW", "my_model")
    (tmp_path / "my_model.py").write_text(MODEL)


def rates(where: Path) -> list[float]:
    configs = [yaml.safe_load((r / "config.yaml").read_text()) for r in run_dirs(where)]
    return [config["optimizer"]["lr"] for config in configs]


def test_trials_are_runs_of_a_multirun_and_the_best_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(*WORDS, RATES, "hydra.sweeper.n_trials=2") == 0

    assert len(set(rates(tmp_path))) == 2
    assert all(1e-4 <= rate <= 1e-2 for rate in rates(tmp_path))
    losses = [summary_of(run)["metrics"]["val/loss"] for run in run_dirs(tmp_path)]
    (results,) = tmp_path.rglob("optimization_results.yaml")
    best = yaml.safe_load(results.read_text())
    assert best["best_value"] == pytest.approx(min(losses))
    assert best["best_params"] == {
        "optimizer.lr": rates(tmp_path)[losses.index(min(losses))]
    }
    shown = capsys.readouterr().out
    assert "not logged in to W&B" in shown
    assert f"best: run {losses.index(min(losses))}, val/loss" in shown
    assert (results.parent / "sweep.png").is_file()
    assert (results.parent / "multirun.yaml").is_file()


def test_a_seed_repeats_the_search(tmp_path: Path) -> None:
    for folder, seed in (("a", 3), ("b", 3), ("c", 4)):
        words = [f"paths.root_dir={hydra_text(str(tmp_path / folder))}"]
        words += ["hydra.sweeper.n_trials=1", f"hydra.sweeper.seed={seed}"]
        assert train(*WORDS, RATES, *words) == 0
    a, b, c = (rates(tmp_path / folder) for folder in "abc")
    assert a == b
    assert a != c


def test_the_engine_learns_from_the_metric_that_a_job_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What bayes is told of the first trials."""
    from trainkit.cli.sweep.offline.engine import Engine

    told = []
    propose = Engine.propose

    def noting(self: Engine, trials):  # type: ignore[no-untyped-def]
        told.append([(trial.state, list(trial.metric)) for trial in trials])
        return propose(self, trials)

    monkeypatch.setattr(Engine, "propose", noting)
    words = ["hydra.sweeper.method=bayes", "hydra.sweeper.n_trials=2"]
    assert train(*WORDS, RATES, *words) == 0
    losses = [summary_of(run)["metrics"]["val/loss"] for run in run_dirs(tmp_path)]
    assert told[0] == []
    assert told[-1] == [("finished", [pytest.approx(loss)]) for loss in losses]


@pytest.mark.parametrize(
    ("values", "states"),
    [
        ("0.001,7,8", ["finished", "failed", "finished"]),
        ("7,9,10,11", ["failed"] * 3),  # three of three: no more are started
    ],
    ids=["some", "all"],
)
def test_failed_trials_do_not_stop_the_others_and_the_status_tells(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    values: str,
    states: list[str],
) -> None:
    own = [f"optimizer.lr={values}", "model._target_=my_model.Mine", "metric=odd"]
    assert train(*WORDS, *own, "hydra.sweeper.method=grid") == 1

    assert [summary_of(run)["status"] for run in run_dirs(tmp_path)] == states
    out, err = capsys.readouterr()
    assert err.count("RuntimeError: seven is too much") == 1
    failed, runs = states.count("failed"), len(states)
    assert f"trainkit | {failed} of {runs} runs failed\n" in out
    if "finished" in states:
        assert "best: run 0, odd 0.001" in out  # not the NaN of 8
    else:
        assert "the first 3 trials crashed" in out


def test_a_metric_that_no_trial_logs_ends_the_sweep(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["metric=val/los", "callbacks.best.monitor=val/loss"]
    assert train(*WORDS, RATES, *words) == 2
    assert len(run_dirs(tmp_path)) == 1
    error = capsys.readouterr().err
    assert "metric: val/los is logged by nothing" in error
    assert "val/loss" in error.partition("there are")[2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["hydra.sweeper.early_terminate={type:hyperband,min_iter:2}"], "needs a W&B"),
        (["hydra.sweeper.n_jobs=0"], "hydra.sweeper.n_jobs"),
        (["hydra.sweeper.n_trails=3"], "Did you mean n_trials"),
        (["hydra.sweeper.method=tpe"], "one of grid, random, bayes"),
        (["logger=wandb", "logger.wandb.mode=nope"], "WandbRunLogger mode"),
        (["ckpt_path=last"], "cannot be used with --multirun"),
        (["optimizer.lrr=1,2"], "Did you mean optimizer.lr"),
    ],
)
def test_a_mistake_is_one_message_and_leaves_nothing(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    assert train(*WORDS, RATES, *words) == 2
    out, error = capsys.readouterr()
    assert message in error
    assert "Traceback" not in error
    assert "proposes the trials" not in out
    assert not (tmp_path / "outputs").exists()
