"""The best weights: by a metric that something logs, and tested at the end."""

from __future__ import annotations

import csv
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.cli import ones_own
from tests.cli.test_evaluate import EPOCHS, OWN, result, trained, trainkit
from tests.cli.training import run_dirs, summary_of, the_run, train
from tests.cli.wandb_runs import folders, records
from tests.startup import ended, forked
from trainkit.cli.comparison import table
from trainkit.cli.runs.folder import RunFolder
from trainkit.cli.train.monitors import _there_are

FIXED = [f"data._target_={OWN}.Data", "accumulation=per_sample", "report=false"]
FIXED += ["trainer.max_epochs=2", "trainer.log_every_n_steps=1"]
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*Skipping val loop"),
    pytest.mark.filterwarnings("ignore:.*dataloader is not resumable"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
]
ONE_EPOCH = "trainer.max_epochs=1"
NO_SANITY = "trainer.num_sanity_val_steps=0"


def own(model: str, *words: str) -> int:
    saved = ["callbacks.checkpoint.every_n_train_steps=1"]
    saved *= "callbacks=none" not in words
    return train(f"model._target_={OWN}.{model}", *words, *saved, small=FIXED)


UNKNOWN = "val/loss is logged by nothing"
BETTER = "there are: val/nll. Choose metric=val/nll"
REFUSED = f"{UNKNOWN}; .*Choose metric="
AT_END = "test/loss is known after training"
STOP = "lightning.pytorch.callbacks.EarlyStopping,monitor:nope"
STOP = f"metric=val/nll +callbacks.mine={{_target_:{STOP}}}"
NOT_VALIDATED = f"{NO_SANITY} trainer.check_val_every_n_epoch=5"
CASES = [
    # The default is no mistake: a line says that there will be no best checkpoint.
    ("Nll", f"data._target_={OWN}.OnlyTrain", 0, UNKNOWN, ""),
    ("Nll", "", 0, f"{UNKNOWN}; {BETTER}", ""),
    # One that was chosen is refused before the first step, if the sanity check shows
    # it; or else the training is finished first.
    ("Nll", "metric=''", 2, "", "metric: must be a name or null, received ''"),
    ("Nll", "metric=val/loss", 2, "", f"{UNKNOWN}; {BETTER}"),
    ("Nll", f"metric=val/loss {NO_SANITY}", 2, UNKNOWN, REFUSED),
    ("Unvalidated", f"metric=val/loss {NO_SANITY}", 2, UNKNOWN, REFUSED),
    ("Unvalidated", f"metric=nope {NO_SANITY}", 2, "nope is logged", "Choose metric="),
    # The controls are there; of the last one no validation has run, so nobody knows.
    ("Late", "metric=val/late", 0, "", ""),
    ("Quiet", "metric=val/nll", 0, "", ""),
    ("Nll", f"metric=val/acc {NOT_VALIDATED}", 0, "", ""),
    # What a callback monitors Lightning looks for; of a test only its end knows.
    ("Nll", STOP, 1, "", "Early stopping conditioned on metric `nope`"),
    ("Net", "metric=test/loss test=true", 0, AT_END, ""),
    ("Net", "metric=test/loss", 2, AT_END, "test/loss is logged by nothing"),
]


@pytest.mark.parametrize(("model", "words", "status", "line", "error"), CASES)
def test_a_metric_that_nothing_logs_is_said_and_if_chosen_a_mistake(
    model: str,
    words: str,
    status: int,
    line: str,
    error: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert own(model, *words.split()) == status
    out, err = capsys.readouterr()
    (*_, last) = ["", *err.splitlines()]
    assert re.search(error, last)
    assert last.startswith("trainkit: metric: ") == (status == 2)
    assert ("Traceback" in err) == (status == 1)
    assert "could not find" not in err
    assert out.count("best checkpoint: none") == bool(line)
    if status == 2 and not line:
        assert not list(tmp_path.rglob("outputs*"))
        return
    run = the_run(tmp_path)
    assert summary_of(run)["status"] == ("failed" if status == 1 else "finished")
    if line:
        at = out.index(f"best checkpoint: none, since {line}")
        assert at < out.index("finished after 10 optimizer steps")
        assert {each.name for each in (run / "checkpoints").iterdir()} == {"last.ckpt"}


def test_of_several_runs_only_that_one_fails(tmp_path: Path) -> None:
    """The other one has a best checkpoint."""
    assert own("Nll", "-m", "metric=val/loss,val/nll", ONE_EPOCH) == 2
    run = the_run(tmp_path)
    assert summary_of(run)["status"] == "finished"
    assert (run / "checkpoints" / "best.ckpt").exists()
    assert run.name == "1"
    assert not (run.parent / "0").exists()


def test_of_several_loaders_the_names_of_the_first_are_proposed() -> None:
    """The control is one loader, of which the closest name is proposed."""
    several = ["train/loss", "val/loss/dataloader_idx_0", "val/loss/dataloader_idx_1"]
    said = _there_are(several, "val/loss")
    assert said.endswith("Choose metric=val/loss/dataloader_idx_0")
    said = _there_are(["train/loss", "val/nll"], "val/nl")
    assert said.endswith("Choose metric=val/nll")


# ---- `test=true` tests the best weights when training has ended ----------------------


def test_it_is_the_test_that_the_command_makes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["metric=test/loss", "callbacks.best.monitor=val/loss"]
    run = trained(tmp_path, "test=true", *words)
    said = capsys.readouterr().out
    at_end = summary_of(run)["test"]
    assert at_end == result(run, "test")
    assert at_end["checkpoint"] == "checkpoints/best.ckpt"
    assert at_end["step"] < summary_of(run)["steps"] == 20
    assert f"test/loss: {at_end['metrics']['test/loss']:.4g}" in said
    assert "val/loss" in summary_of(run)["metrics"]
    with (run / "metrics.csv").open() as file:
        logged = [float(r["test/loss"]) for r in csv.DictReader(file) if r["test/loss"]]
    assert logged == [at_end["metrics"]["test/loss"]]
    header, row = table([RunFolder(run)])  # by which runs are compared
    assert header.split()[-1] == "test/loss"
    assert float(row.split()[-1]) == pytest.approx(logged[0], rel=1e-5)
    assert trainkit("test", run) == 0
    assert result(run, "test")["metrics"] == at_end["metrics"]
    assert trainkit("test", run / "checkpoints" / "last.ckpt") == 0
    assert result(run, "test")["metrics"] != at_end["metrics"]  # the control
    capsys.readouterr()
    assert trainkit("train", f"ckpt_path={run}/checkpoints/last.ckpt") == 0
    assert "| test" not in capsys.readouterr().out  # nothing was left to train


@pytest.mark.parametrize(
    ("words", "options", "text"),
    [
        ([], {"model": "Bare"}, "model: must have test_step to test, and Bare has"),
        ([], {"data": "BareData"}, "data: BareData has no test_dataloader"),
        (["trainer.enable_checkpointing=false"], {}, "test: needs a checkpoint"),
    ],
)
def test_what_cannot_be_tested_is_refused_before_training(
    words: list[str],
    options: dict[str, str],
    text: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(ValueError, match="not enough values"):  # no run has begun
        trained(tmp_path, "test=true", *words, status=2, **options)
    shown = capsys.readouterr().err
    assert text in shown
    assert shown.count("trainkit: ") == 1
    assert not run_dirs(tmp_path)


def test_one_that_fails_leaves_the_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(tmp_path, "test=true", model="Failing", status=1)
    assert "ZeroDivisionError: in test_step" in capsys.readouterr().err
    summary = summary_of(run)
    assert (summary["status"], summary["test"]) == ("finished", None)


@pytest.mark.parametrize(
    ("hook", "training"),
    [("test_step", "finished"), ("on_train_epoch_start", "interrupted")],
)
def test_a_signal_ends_it_or_the_training_before_which_is_not_tested(
    hook: str,
    training: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def stop(*args: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(ones_own.Net, hook, stop, raising=False)
    run = trained(tmp_path, "test=true", status=143)
    summary = summary_of(run)
    assert (summary["status"], summary["test"]) == (training, None)
    capsys.readouterr()
    if hook == "test_step":
        assert trainkit("test", run) == 143
        assert "stopped by SIGTERM" in capsys.readouterr().out
    assert not (run / "test.json").exists()


def test_it_is_in_the_one_run_of_wandb(private_wandb: Path) -> None:
    """Which is opened again, in a second file."""
    run = trained(private_wandb, "test=true", "logger=wandb")
    found = folders(run)
    assert len({f.name for folder in found for f in folder.glob("run-*.wandb")}) == 1
    shown = str([records(folder) for folder in found])
    assert "val/loss" in shown
    assert "test/loss" in shown
    assert "'type': 'exit'" in shown


@pytest.mark.slow
def test_each_row_counts_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nine rows to test are ten on two ranks, and nine on one device."""
    own = [f"model._target_={OWN}.Net", f"data._target_={OWN}.Data", "test=true"]
    command = [sys.executable, "-m", "trainkit", "train", *own, *EPOCHS]
    command += ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2"]
    env = dict(os.environ, TRAINKIT_ALLOW="tests", **forked())
    done = ended(command, tmp_path, env)
    assert done.returncode == 0, done.stderr
    assert "; on 2 ranks some rows may count twice" in done.stdout
    run = the_run(tmp_path)
    at_end = summary_of(run)["test"]
    assert at_end == result(run, "test")
    assert trainkit("test", run) == 0
    assert "the run had trainer.devices=2" in capsys.readouterr().out
    once = result(run, "test")
    assert once["step"] == at_end["step"]
    assert once["metrics"] != at_end["metrics"]  # of nine rows, one counted twice
    assert trainkit("test", run, "trainer=cpu") == 0
    assert result(run, "test")["metrics"] == once["metrics"]
