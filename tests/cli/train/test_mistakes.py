"""What is wrong with a command is said in one message, before anything is trained."""

from __future__ import annotations

import copy
import shlex
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from recipes.code_lm import CodeLM
from tests.cli.training import SMALL, run_dirs, summary_of, the_run, train
from trainkit.cli.composition import Composition
from trainkit.cli.errors import guarded
from trainkit.cli.runs.folder import only_one
from trainkit.cli.runs.resume import expand
from trainkit.cli.words import quoted
from trainkit.config.build import build


class NoModule:
    def __init__(self, **kwargs: int) -> None:
        pass


class Broken(CodeLM):
    def __init__(self, **kwargs: int) -> None:
        raise ZeroDivisionError("in its constructor")


def is_one_message(text: str, shown: str) -> bool:
    is_alone = "Traceback" not in shown and shown.count("trainkit: ") == 1
    return is_alone and text in shown


SPAWNED = "trainer.strategy=ddp_spawn trainer.accelerator=cpu trainer.devices=2"
TWO = "+callbacks.mine={_target_:lightning.pytorch.callbacks.ModelCheckpoint,"
TWO += "monitor:val/loss}"
NO_END = "trainer.max_steps=-1 trainer.max_epochs=-1"


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        # What Hydra says of words,
        ("--trainer.max_steps=3", "arguments: --trainer.max_steps=3. Settings have"),
        ("--config-path=pkg://trainkit.conf trainer.devices=0", "devices"),
        ("--config-path=nowhere", "/nowhere' exists and readable"),
        ("accumulation=null", "A group takes the name of one of its options"),
        ("=1", "overrides: Config group override must be a string"),
        ("accumulation=x", "\tper_token\n"),
        ("--config-dir=nowhere", "nowhere' not found"),
        # trainkit of a configuration, and of a run that cannot begin;
        ("ckpt_path=nowhere.ckpt", "does not exist"),
        ("paths.root_dir=/dev/null", "the folder of the run cannot be created"),
        # or the training, before its first step.
        ("scheduler=one_cycle scheduler.pct_start=5", "scheduler: Expected float"),
        (NO_END, "scheduler.total_steps: `auto` needs an end"),
        (TWO, "Found more than one stateful callback"),
        (SPAWNED, "DDPStrategy with start_method='spawn' end with fit"),
    ],
)
def test_a_mistake_is_one_message_and_2(
    overrides: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(*overrides.split()) == 2
    assert is_one_message(text, capsys.readouterr().err)


@pytest.fixture(scope="module")
def composed() -> DictConfig:
    """What the command line of `SMALL` composes, once for all values below."""
    return Composition([*SMALL, "paths.run_dir=run"]).config


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("seed", -1, "seed: must be from 0 to 4294967295, received -1"),
        ("callbacks.monitor.every_n_steps", 0, "WindowMonitor every_n_steps: must be"),
        ("trainer.strategy", "x", "trainer: lightning.pytorch.Trainer could not be"),
        ("model._target_", f"{__name__}.Broken", "in its constructor\nTRAINKIT_TRACE"),
        ("model._target_", f"{__name__}.NoModule", "must make a LightningModule"),
        ("model.width", 3, "model.width: CodeLM has no such argument"),
        ("trainer.plugins", [{"_target_": "os.getcwd"}], "os.getcwd"),
        ("micro_batching.size", 3, "micro_batching: must have a _target_"),
        ("optimizer", None, "Choose scheduler=none"),
    ],
)
def test_a_value_that_does_not_fit_is_one_message_and_2(
    key: str,
    value: Any,
    text: str,
    composed: DictConfig,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Composing takes much longer than refusing."""
    config = copy.deepcopy(composed)
    OmegaConf.set_struct(config, False)
    OmegaConf.update(config, key, value)

    def built() -> int:
        build(config)
        return 0

    assert guarded(built) == 2
    assert is_one_message(text, capsys.readouterr().err)


def test_what_an_experiment_says_of_an_optimizer_that_is_taken_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["experiment=ragged_regression", "optimizer=none", "scheduler=none"]
    assert train(*words, small=[]) == 2
    away = "'~optimizer.lr' '~optimizer.weight_decay'"
    shown = capsys.readouterr().err
    assert shown.endswith(f" or take it out: {away}\n")
    assert train(*words, *shlex.split(away), "mode=foo", small=[]) == 2
    assert "trainkit: mode: must be min or max" in capsys.readouterr().err


def test_a_refusal_is_not_said_twice(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("lr_scaling=sqrt", "lr_scaling.reference_batch=-3") == 2
    shown = capsys.readouterr().err
    assert shown.startswith("trainkit: LRScaling reference_batch: must be a positive")
    assert shown.count("reference_batch: must be") == 1
    assert train("trainer.max_steps=-2") == 2
    assert capsys.readouterr().err.count("You passed in -2") == 1


def test_a_file_of_ones_own_is_yaml_and_needs_a_target(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for group, content, text in (
        ("model", "a: [1\n", "mine.yaml"),
        ("model", "depth: 1\n", "line _target_: my_module.MyClass"),
        ("optimizer", "depth: 1\n", "line _target_: my_module.MyClass"),
    ):
        (tmp_path / group).mkdir(exist_ok=True)
        (tmp_path / group / "mine.yaml").write_text(content)
        words = ["experiment=demo", f"{group}=mine", f"--config-dir={tmp_path}"]
        assert train(*words, "name=own", small=[]) == 2
        assert is_one_message(text, capsys.readouterr().err)
        assert not run_dirs(tmp_path)


def test_it_does_without_logger_and_callbacks(tmp_path: Path) -> None:
    """Also without a progress bar. `callbacks=none` leaves out all of them."""
    bare = ["logger=none", "trainer.enable_progress_bar=false"]
    small = ["debug=default", "data.num_train=16", "data.num_val=8", "model.d_model=8"]
    small += ["trainer.max_steps=1", "report=false", "data.max_length=128"]
    assert train(*bare, "callbacks=none", "metric=null", small=small) == 0
    assert (the_run(tmp_path) / "metrics.csv").exists()  # each run has it


def test_callbacks_with_nothing_to_do_are_left_out(tmp_path: Path) -> None:
    """There are no checkpoints, and no windows to monitor."""
    model = "model._target_=tests.cli.training.Foreign"
    off = ["trainer.enable_checkpointing=false", "accumulation=none"]
    off.append("trainer.accumulate_grad_batches=1")
    assert train(model, *off) == 0
    assert not list(tmp_path.rglob("*.ckpt"))


def test_what_lightning_allows_is_no_mistake() -> None:
    words = ["trainer.val_check_interval='00:00:05:00'", "trainer.log_every_n_steps=0"]
    assert train(*words, "callbacks.monitor=null", "trainer.max_steps=1") == 0


def test_places_with_odd_names(tmp_path: Path) -> None:
    where = tmp_path / "ü = (x), [y] {z} it's"
    root = f"paths.root_dir={quoted(where)}"
    assert train(root, "name=a/b") == 0
    (run,) = run_dirs(where / "outputs" / "a" / "b")
    saved = run / "checkpoints" / "last.ckpt"
    words = [root, "name=a/b", "trainer.max_steps=3"]
    assert train("ckpt_path=last", *words, small=[]) == 0
    assert run_dirs(tmp_path) == [run]
    assert summary_of(run)["steps"] == 3
    assert expand([f"ckpt_path={quoted(saved)}"]) == expand([f"ckpt_path={saved}"])


def test_a_multirun_without_runs_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "outputs" / "demo" / "multirun"
    assert train("-m", "name=demo", "seed=range(1,1)") == 2
    assert is_one_message("must give at least one run", capsys.readouterr().err)
    assert not list(runs.glob("*"))
    assert train("-m", "name=demo", "seed=range(1,2)") == 0  # the control
    assert len(list(runs.glob("*"))) == 1


def test_a_refusal_leaves_the_folders_that_were_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither a new one nor those above it, but one with files, and one in use."""
    wrong, mine = "optimizer.lr=-1", tmp_path / "mine"
    said = "optimizer: Invalid learning rate: -1"
    for word, text in ((wrong, said), ("trainer.devices=0", "devices")):
        assert train(word) == 2
        assert is_one_message(text, capsys.readouterr().err)
        assert not list(tmp_path.iterdir())
    here = f"paths.run_dir={mine}/run"
    assert train(here, "trainer.max_steps=1") == 0  # the control
    (mine / "thesis.txt").write_text("years of work")
    for words in ([], [f"paths.run_dir={mine}/new/run"], [here]):
        assert train(wrong, *words) == 2
        assert run_dirs(tmp_path) == [mine / "run"]
    assert train(wrong, f"paths.run_dir={mine}") == 2
    assert {each.name for each in mine.iterdir()} == {"run", "thesis.txt"}
    assert (mine / "thesis.txt").read_text() == "years of work"
    assert {each.name for each in tmp_path.iterdir()} == {"mine"}
    with only_one(tmp_path / "used", what="paths.run_dir"):
        assert train("paths.run_dir=used") == 2
        assert (tmp_path / "used").exists()
