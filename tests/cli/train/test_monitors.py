"""A metric that is monitored and that nothing logs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.training import run_dirs, summary_of, the_run, train
from trainkit.cli.train.monitors import _there_are

FIXED = [
    "data._target_=tests.cli.ones_own.Data", "trainer.max_epochs=2", "report=false",
    "trainer.log_every_n_steps=1", "accumulation=per_sample",
]  # fmt: skip
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*Skipping val loop"),
    pytest.mark.filterwarnings("ignore:.*dataloader is not resumable"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
]
ONE_EPOCH = "trainer.max_epochs=1"
NO_SANITY = "trainer.num_sanity_val_steps=0"
ENDED = "so this run has no metric; it ended before its first validation"


def own(model: str, *words: str) -> int:
    flags = [word for word in words if word.startswith("-")]
    rest = [word for word in words if not word.startswith("-")]
    if "callbacks=none" not in words:
        rest.append("callbacks.checkpoint.every_n_train_steps=1")
    return train(
        *flags, *FIXED, f"model._target_=tests.cli.ones_own.{model}", *rest, small=[]
    )


def test_without_validation_there_is_no_best_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert own("Nll", "data._target_=tests.cli.ones_own.OnlyTrain", ONE_EPOCH) == 0
    said = capsys.readouterr()
    line = "trainkit | best checkpoint: none, since Nll has no validation; last"
    assert said.out.count(line) == 1
    assert "was not logged" not in said.out
    assert "could not find" not in said.err
    files = {path.name for path in (the_run(tmp_path) / "checkpoints").iterdir()}
    assert files == {"last.ckpt"}


def test_a_default_that_is_not_logged_is_a_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert own("Nll", ONE_EPOCH) == 0
    said = capsys.readouterr().out
    assert ENDED not in said  # the control of what follows
    assert said.count("best checkpoint: none, since val/loss is logged by nothing") == 1
    assert "there are: val/nll" in said
    assert "Choose metric=val/nll" in said
    bare = ["callbacks=none", "trainer.enable_progress_bar=false", ONE_EPOCH]
    assert own("Unvalidated", *bare) == 0
    said = capsys.readouterr().out
    assert "metric: val/loss was not logged, so this run has no metric; there" in said


@pytest.mark.filterwarnings("ignore:.*could not find the monitored key")
def test_an_end_before_the_first_validation_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert own("Nll", NO_SANITY, "trainer.max_epochs=null", "trainer.max_steps=1") == 0
    assert ENDED in capsys.readouterr().out


@pytest.mark.parametrize(
    ("model", "metric", "said"),
    [
        (
            "Unvalidated",
            "val/loss",
            "is logged by nothing, since Unvalidated has no validation",
        ),
        ("Nll", "''", "metric: must be a name or null, received ''"),
        ("Nll", "val/loss", "val/loss is logged by nothing; there are: val/nll. Ch"),
    ],
)
def test_one_that_was_chosen_is_refused_before_the_first_step(
    model: str,
    metric: str,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The last one shows in the sanity check."""
    assert own(model, f"metric={metric}") == 2
    shown = capsys.readouterr().err
    assert said in shown
    assert "Traceback" not in shown
    assert not list(tmp_path.rglob("outputs*"))


@pytest.mark.parametrize(
    ("model", "words"),
    [("Quiet", ["metric=val/loss"]), ("Unvalidated", ["metric=nope"])],
)
def test_it_ends_a_training_that_would_go_on(
    model: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After the first epoch, with a checkpoint from which it continues."""
    assert own(model, *words) == 2
    shown = capsys.readouterr().err
    assert "window/loss" in shown
    assert "Traceback" not in shown
    assert "Choose metric=" in shown
    run = the_run(tmp_path)
    assert summary_of(run)["steps"] == 5
    last = run / "checkpoints" / "last.ckpt"
    assert f"trainkit train ckpt_path={last}" in shown
    if model == "Unvalidated":
        assert train(f"ckpt_path={last}", "metric=window/loss", small=[]) == 0
        assert summary_of(run)["steps"] == 10


def test_a_training_at_its_end_is_finished_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert own("Nll", "metric=val/loss", NO_SANITY, ONE_EPOCH) == 2
    said = capsys.readouterr()
    assert "finished after 5 optimizer steps" in said.out
    assert said.err.splitlines()[-1].startswith("trainkit: metric: val/loss is logged")
    run = the_run(tmp_path)
    assert summary_of(run)["status"] == "finished"
    assert (run / "checkpoints" / "last.ckpt").exists()


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("Late", ["metric=val/late"]),
        ("Quiet", ["metric=val/nll"]),
        # No validation has run, so nobody knows.
        ("Nll", ["metric=val/acc", NO_SANITY, "trainer.check_val_every_n_epoch=5"]),
    ],
)
def test_what_is_there_is_no_mistake(model: str, words: list[str]) -> None:
    """The controls."""
    assert own(model, *words, ONE_EPOCH) == 0


def test_what_a_callback_monitors_lightning_looks_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    stop = "+callbacks.mine={_target_: lightning.pytorch.callbacks.EarlyStopping"
    assert own("Nll", "metric=val/nll", f"{stop}, monitor: nope}}") == 1
    assert "Early stopping conditioned on metric `nope`" in capsys.readouterr().err


def test_a_metric_of_the_test_at_the_end_is_looked_for_there(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["metric=test/loss", ONE_EPOCH]
    assert own("Net", *words, "test=true") == 0
    said = capsys.readouterr().out
    assert "best checkpoint: none, since test/loss is known after training" in said
    assert own("Net", *words) == 2  # the control
    assert "test/loss is logged by nothing" in capsys.readouterr().err


def test_of_several_runs_only_that_one_fails(tmp_path: Path) -> None:
    """The other one has a best checkpoint."""
    assert own("Nll", "-m", "metric=val/nll,val/loss", ONE_EPOCH) != 0
    good, bad = run_dirs(tmp_path)
    assert summary_of(good)["status"] == "finished"
    assert (good / "checkpoints" / "best.ckpt").exists()
    assert summary_of(bad)["status"] == "failed"


def test_of_several_loaders_the_names_of_the_first_are_proposed() -> None:
    """The control is one loader, of which the closest name is proposed."""
    several = ["train/loss", "val/loss/dataloader_idx_0", "val/loss/dataloader_idx_1"]
    said = _there_are(several, "val/loss")
    assert said.endswith("Choose metric=val/loss/dataloader_idx_0")
    said = _there_are(["train/loss", "val/nll"], "val/nl")
    assert said.endswith("Choose metric=val/nll")
