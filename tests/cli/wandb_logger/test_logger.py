"""WandbRunLogger with the real client: offline, and against the stand-in server."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import wandb
from jsonargparse import ArgumentParser
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import OmegaConf

from tests.cli.wandb_runs import (
    DATA,
    STEPS,
    axes,
    fit,
    folders,
    only_run,
    rows,
    sync,
    window_losses,
)
from tests.helpers import TokenModule, loader
from tests.wandb_server import WandbServer
from trainkit import LRScaling, WandbRunLogger
from trainkit.cli.runs.folder import wandb_run_of
from trainkit.cli.wandb_logger import WandbFacts
from trainkit.config import instantiate
from trainkit.errors import TrainkitError
from trainkit.lit.callback.base import Stopped

GROUP_FILE = Path(__file__).parents[3] / "conf/logger/wandb.yaml"


# ---- offline -------------------------------------------------------------------------


def test_offline_runs_of_one_folder_are_whole_and_synced_to_one_run(
    private_wandb: Path, wandb_server: WandbServer
) -> None:
    """Without a login, and beside another logger; no row is there twice."""
    for _ in range(2):
        csv = CSVLogger(private_wandb, name="c")
        fit([WandbRunLogger(save_dir=private_wandb), csv])
    written = [rows(folder) for folder in folders(private_wandb)]
    assert len(written) == 2
    for folder, of_run in zip(folders(private_wandb), written, strict=True):
        assert folder.name.startswith("offline-run-")
        history = [row for row in of_run if "window/loss" in row]
        assert [row["trainer/global_step"] for row in history] == list(range(STEPS))
        assert [row["window/samples_seen"] for row in history] == [16, 32, 38]
        sync(wandb_server, folder, private_wandb)
    run = only_run(wandb_server)
    assert window_losses(run.history) == window_losses(written[0] + written[1])
    assert run.num_rows_received == len(run.history) == sum(map(len, written))
    assert wandb_server.unknown == []


def test_without_a_folder_each_run_is_its_own(private_wandb: Path) -> None:
    for _ in range(2):
        logger = WandbRunLogger()
        logger.log_metrics({"x": 1}, step=0)
        logger.finalize("success")
    names = [folder.name.rsplit("-")[-1] for folder in folders(private_wandb)]
    assert len(set(names)) == 2


@pytest.mark.parametrize(
    ("files", "run"),
    [
        ([], None),
        (["latest-run/a", "debug.log"], None),
        (["run-20_12-a/run-a.wandb", "offline-run-20_13-b-c/run-b-c.wandb"], "b-c"),
        (["offline-run-20_12-a/run-a.wandb", "run-20_13-b/run-b.wandb"], "b"),
        (["offline-run-20_12-a-1/run-a.wandb"], "a"),  # two began in one second
    ],
)
def test_the_run_of_a_folder_is_the_newest_that_has_files_there(
    files: list[str], run: str | None, tmp_path: Path
) -> None:
    for file in files:
        path = tmp_path / "wandb" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert wandb_run_of(tmp_path) == run
    assert wandb_run_of(None) is None


# ---- online --------------------------------------------------------------------------


def test_the_server_receives_rows_configuration_and_description(
    online: WandbServer, private_wandb: Path
) -> None:
    logger = WandbRunLogger(
        project="q", group="g", tags=["a", "b"], job_type="j", save_dir=private_wandb
    )
    objects = {"dtype": torch.float32, "call": len, "path": Path("a")}
    logger.log_hyperparams({"optimizer": {"lr": 0.5}, **objects})
    fit(logger)
    run = only_run(online)
    assert len(window_losses(run.history)) == STEPS
    assert all("window/seen" in row for row in run.history if "window/loss" in row)
    assert axes(run.metrics) == {"*": "trainer/global_step"}
    assert run.config["optimizer"] == {"lr": 0.5}
    assert (run.group, run.tags, run.job_type) == ("g", ["a", "b"], "j")
    assert run.fields["project"] == "q"
    assert (run.state, run.exit_code) == ("finished", 0)
    assert online.unknown == []
    fit(WandbRunLogger(project="q", save_dir=private_wandb))  # goes on with the run
    run = only_run(online)
    assert run.num_rows_received == len(run.history)
    assert len(window_losses(run.history)) == 2 * STEPS


class Fails(pl.Callback):
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        raise self.error


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (RuntimeError("no"), "failed"),
        (Stopped(128 + signal.SIGTERM), "finished"),
        (Stopped(128 + signal.SIGINT), "failed"),
    ],
)
def test_the_state_of_the_run_is_that_of_the_training(
    online: WandbServer, private_wandb: Path, error: BaseException, state: str
) -> None:
    """Lightning leaves by SystemExit on SIGTERM, as a sweep's early stop sends it."""
    with pytest.raises(type(error)):
        fit(WandbRunLogger(save_dir=private_wandb), Fails(error))
    assert only_run(online).state == state


@pytest.mark.parametrize("log_model", ["all", False])
def test_checkpoints_are_artifacts_if_asked(
    online: WandbServer, private_wandb: Path, log_model: Any
) -> None:
    saves = ModelCheckpoint(private_wandb / "checkpoints", save_last=False)
    logger = WandbRunLogger(save_dir=private_wandb, log_model=log_model)
    fit(logger, saves, enable_checkpointing=True)
    found = [artifact["files"] for artifact in online.artifacts.values()]
    expected = Path(saves.best_model_path).read_bytes()
    assert [files["model.ckpt"] for files in found] == [expected] * bool(log_model)
    assert all(artifact["committed"] for artifact in online.artifacts.values())


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # wandb's own
def test_what_a_sweep_has_set_is_logged_beside_it(
    online: WandbServer, private_wandb: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = private_wandb / "config-defaults.yaml"
    parameters.write_text("lr_scaling: {value: sqrt}\n")
    monkeypatch.setenv("WANDB_SWEEP_ID", "sw0")
    monkeypatch.setenv("WANDB_RUN_ID", "sw0r0")
    monkeypatch.setenv("WANDB_SWEEP_PARAM_PATH", str(parameters))
    logger = WandbRunLogger(save_dir=private_wandb)
    logger.log_hyperparams({"lr_scaling": {"k": 2}, "seed": 1})
    logger.log_hyperparams({"lr_scaling": {"lr": 0.1}})
    logger.finalize("success")
    config = online.runs["sw0r0"].config
    assert config["lr_scaling"] == "sqrt"
    assert config["trainkit"] == {"lr_scaling": {"k": 2, "lr": 0.1}, "seed": 1}


# ---- whatever else happens to a logger -----------------------------------------------


def test_logging_after_fit_goes_to_the_same_run(
    online: WandbServer, private_wandb: Path
) -> None:
    class Tests(TokenModule):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test/loss", self.training_step(batch, batch_idx))

    logger = WandbRunLogger(save_dir=private_wandb)
    found = fit(logger)
    found.test(Tests(), loader(DATA, 4), verbose=False)
    found.fit_loop.max_epochs = 2
    found.fit(TokenModule(), loader(DATA, 4))
    run = only_run(online)
    assert "test/loss" in run.summary
    assert len(window_losses(run.history)) == 2 * STEPS
    assert run.state == "finished"


def test_a_run_that_somebody_else_has_finished_is_opened_again(
    online: WandbServer, private_wandb: Path
) -> None:
    logger = WandbRunLogger(save_dir=private_wandb)
    logger.log_metrics({"x": 1}, step=0)
    wandb.finish()
    logger.log_metrics({"x": 2}, step=1)
    logger.finalize("success")
    assert [row["x"] for row in only_run(online).history] == [1, 2]


@pytest.mark.filterwarnings("ignore:There is a wandb run already in progress")
def test_a_run_of_the_users_own_is_logged_to_and_left_open(
    online: WandbServer, private_wandb: Path
) -> None:
    with wandb.init(project="mine", id="mine") as run:
        fit(WandbRunLogger(save_dir=private_wandb))
        run.log({"after": 1})
    assert only_run(online).name == "mine"
    assert only_run(online).summary["after"] == 1


def test_other_ranks_open_no_run(
    private_wandb: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    logger = WandbRunLogger(save_dir=private_wandb)
    logger.log_hyperparams({"a": 1})
    logger.log_metrics({"window/loss": 1.0, "window/seen": 2.0}, step=0)
    logger.experiment.log({"x": 1})
    logger.finalize("success")
    assert wandb.run is None
    assert list(private_wandb.iterdir()) == []


def test_disabled_writes_nothing(private_wandb: Path) -> None:
    fit(WandbRunLogger(save_dir=private_wandb / "run", mode="disabled"))
    assert list((private_wandb / "run").iterdir()) == []


# ---- refusals ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"mode": "on"}, "mode: must be one of .'auto', 'online', 'offline', 'dis"),
        ({"finish_timeout": 0}, "finish_timeout: must be a number of seconds above 0"),
        ({"init_timeout": True}, "init_timeout: must be a number of seconds above 0"),
        ({"log_model": "last"}, "log_model: must be one of .'all'., true or false"),
    ],
)
def test_options_are_checked(options: dict[str, Any], text: str) -> None:
    with pytest.raises(TrainkitError, match=text):
        WandbRunLogger(**options)


def test_both_doors_make_the_logger_of_its_file(private_wandb: Path) -> None:
    options: Any = OmegaConf.load(GROUP_FILE).wandb
    options.update(save_dir="run", tags=["a"], log_model="all", mode="offline")
    plain: Any = OmegaConf.to_container(options)
    parser = ArgumentParser()
    parser.add_subclass_arguments(Logger, "logger")
    flags = [
        f"--logger.{key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in plain.items()
        if key != "_target_"
    ]
    parsed = parser.parse_args(["--logger=trainkit.WandbRunLogger", *flags])
    made = [parser.instantiate(parsed).logger, instantiate(options)]
    for logger in made:
        assert isinstance(logger, WandbRunLogger)
        assert logger.save_dir == "run"
    assert vars(made[0]) == vars(made[1])


def test_effective_batch_and_rates_equal_those_of_the_training(
    online: WandbServer, private_wandb: Path
) -> None:
    """Three windows an epoch; the tokens are the mean of all."""
    scaling = LRScaling("linear", reference_batch=8)
    fit(WandbRunLogger(save_dir=private_wandb), WandbFacts(), scaling, epochs=2)
    config = only_run(online).config
    assert config["effective_batch"] == {
        "samples": 16,
        "micro_batch_samples": 4,
        "accumulate": 4,
        "replicas": 1,
        "tokens": pytest.approx(sum(len(labels) for _, labels in DATA) / 3),
    }
    scaling = config["lr_scaling"]
    assert (scaling["k"], scaling["effective_batch"]) == (2, 16)
    rates = [scaling[f"optimizer_0/lr/{when}"] for when in ("before", "after")]
    assert rates == [0.5, 1.0]
    assert config["learning_rate"] == {"optimizer_0": [1.0]}
