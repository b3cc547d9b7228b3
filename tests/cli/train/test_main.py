"""`trainkit train`, from its command line to what it leaves behind."""

from __future__ import annotations

import contextlib
import csv
import io
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import LightningModule, seed_everything
from torchmetrics.classification import BinaryConfusionMatrix

import trainkit
from recipes.code_lm import CodeLM, Functions
from tests.cli.report.runs import SUMMARY
from tests.cli.training import (
    OPTIMIZED,
    SMALL,
    Optimized,
    own_option,
    run_dirs,
    same_weights,
    summary_of,
    the_run,
    train,
    weights_of,
)
from tests.helpers import trainer
from trainkit import AccumulationCallback, PerSample, PerToken, warmup_cosine
from trainkit.cli.runs.summary import rows


def test_a_run_leaves_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its metrics are rows of steps."""
    assert train("seed=3") == 0
    run = the_run(tmp_path)
    names = {path.name for path in run.iterdir()}
    assert names >= {
        "checkpoints", "config.yaml", "metrics.csv", "overrides.yaml", "summary.json",
        "train.log",
    }  # fmt: skip
    assert not any("profile" in name for name in names)
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["model"]["max_length"] == 128  # resolved
    assert yaml.safe_load((run / "overrides.yaml").read_text()) == [*SMALL, "seed=3"]
    summary = summary_of(run)
    assert summary["status"] == "finished"
    assert summary["steps"] == 2
    assert summary["windows"]["windows"] == 2
    assert summary["effective_batch"]["size"] == 8
    assert summary["micro_batching"] is None
    assert summary["checkpoint"] == f"{run}/checkpoints/last.ckpt"
    assert summary["metrics"]["val/loss"] > 0
    assert summary["plain_accumulation"]["mean"] > 0
    assert summary["versions"]["torch"] == version("torch")
    assert summary["versions"]["trainkit"] == trainkit.__version__
    with (run / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["1", "2"]
    assert all(rows[1][name] for name in ("window/loss", "lr-AdamW", "val/loss"))
    said = capsys.readouterr().out
    for text in (
        "step: per-device batch 2 x accumulation 4",  # before
        "step 2 of 2: ",  # during
        "window/loss: ",  # after
        "window weight: ",
        "learning rate: ",
        "plain accumulation: its gradients would have been off by",
        "throughput: ",
        f"written to: {run}",
    ):
        assert f"trainkit | {text}" in said
    assert "\x1b" not in said  # there is no terminal
    assert summary["throughput"]["steps"] == 1


def test_with_a_schedule_the_effective_batch_is_that_of_the_last_step(
    tmp_path: Path,
) -> None:
    words = ["schedule.over=2", "schedule.end=4", "trainer.max_steps=3"]
    assert train("experiment=growing_batch", *words, "trainer.profiler=simple") == 0
    run = the_run(tmp_path)
    assert summary_of(run)["steps"] == 3
    batch = summary_of(run)["effective_batch"]
    assert (batch["accumulate"], batch["size"]) == (4, 8)
    assert "run_training_epoch" in (run / "fit-profile.txt").read_text()


def test_an_inner_cut_is_summed_up_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = ["trainer.accumulate_grad_batches=1", "data.batch_size=4"]
    one += ["trainer.max_steps=1", "accumulation=none"]
    assert train(*one, "micro_batching=inside", "micro_batching.size=3") == 0
    limits = summary_of(the_run(tmp_path))["micro_batching"]
    assert (limits["size"], limits["found"]) == (3, None)
    said = f"micro-batches: size=3, inside={limits['inside']}"
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"size": 3}, "size=3"),
        ({"size": 3, "tokens": 64}, "size=3, tokens=64"),
        ({"found": 2}, "found=2"),
        ({"inside": "net"}, "inside=net"),
        ({}, "auto"),
    ],
)
def test_the_cut_of_loader_batches_is_in_the_table(
    limits: dict[str, Any], said: str
) -> None:
    known = {"size": None, "tokens": None, "found": None, **limits}
    facts = {**SUMMARY, "micro_batching": known}
    assert dict(rows(facts))["micro-batches"] == said


def by_hand(
    module: LightningModule, accumulate: int, **options: Any
) -> dict[str, torch.Tensor]:
    """The same training in Python, without any configuration."""
    data = Functions(batch_size=2, max_length=128, num_train=64, num_val=8, seed=0)
    run = trainer(accumulate, max_steps=2, gradient_clip_val=1.0, **options)
    run.fit(module, data)
    return module.state_dict()


class ByHand(CodeLM):
    accumulation = PerToken()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.01)
        scheduler = warmup_cosine(optimizer, total_steps=2, warmup=0.1, final=0.1)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


SECRET = "sk-987654321"


@pytest.fixture(scope="module")
def two_strategies(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Where a multirun was, and what it said."""
    where = tmp_path_factory.mktemp("multirun")
    said = io.StringIO()
    keys = [f"+hub={{api_key: {SECRET}}}", f"+hub.other.api_key={SECRET}"]
    keys.append("seed=${oc.select:hub.seed,0}")  # a key that nothing uses is refused
    window = "trainer.accumulate_grad_batches=8"
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        patch.chdir(where)
        patch.setattr(sys, "argv", ["trainkit"])
        assert train("-m", "accumulation=per_token,uniform", window, *keys) == 0
    return where, said.getvalue()


def test_it_is_the_hand_written_training_to_the_bit(
    two_strategies: tuple[Path, str],
) -> None:
    per_token, uniform = run_dirs(two_strategies[0])
    seed_everything(0, verbose=False)
    module = ByHand(d_model=8, num_layers=1, num_heads=1, max_length=128)
    expected = by_hand(module, 8, limit_val_batches=0)
    assert same_weights(weights_of(per_token), expected)
    assert not same_weights(weights_of(uniform), expected)  # the control


def test_a_multirun_compares(two_strategies: tuple[Path, str]) -> None:
    where, said = two_strategies
    losses = {
        name: summary_of(run)["metrics"]["val/loss"]
        for name, run in zip(("per_token", "uniform"), run_dirs(where), strict=True)
    }
    for run in run_dirs(where):  # each has its own log
        lines = (run / "train.log").read_text().splitlines()
        assert sum("trainkit | training: " in line for line in lines) == 1
        assert not any("all runs" in line for line in lines)
    assert losses["per_token"] != losses["uniform"]
    header, *rows = said.splitlines()[-4:-1]
    assert header.split() == ["run", "accumulation", "training", "steps", "val/loss"]
    shown = {row.split()[1]: row.split()[4] for row in rows}
    assert shown == {name: f"{loss:.6g}" for name, loss in losses.items()}
    assert list(shown) == sorted(losses, key=losses.__getitem__)


def test_secrets_of_a_command_line_are_not_written_down(
    two_strategies: tuple[Path, str],
) -> None:
    where, _ = two_strategies
    written = [path for path in where.rglob("*") if path.is_file()]
    assert len(written) > 10
    for path in written:
        assert SECRET.encode() not in path.read_bytes(), path


class PerRow(PerSample):
    """A strategy of a user's own."""


FOREIGN = [word for word in SMALL if not word.startswith("model.")] + ["model=mine"]


def test_a_foreign_module_and_a_strategy_of_ones_own(tmp_path: Path) -> None:
    own_option(tmp_path, "accumulation", f"{__name__}.PerRow\nsize: null\n")
    own_option(tmp_path, "model", f"{OPTIMIZED}\nwidth: 3\n")
    asked = [*FOREIGN, "accumulation=mine", "metric=null", "proof=off"]
    asked += ["trainer.limit_val_batches=0", f"--config-dir={tmp_path}"]
    assert train(*asked, "optimizer=none", "scheduler=none", small=[]) == 0
    seed_everything(0, verbose=False)
    callback = AccumulationCallback(PerSample(), proof="off")
    expected = by_hand(Optimized(width=3), 4, callbacks=[callback])
    assert same_weights(weights_of(the_run(tmp_path)), expected)


def test_a_module_with_its_own_optimizer_refuses_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own_option(tmp_path, "model", f"{OPTIMIZED}\n")
    assert train(*FOREIGN, f"--config-dir={tmp_path}", small=[]) == 2
    assert "Choose optimizer=none" in capsys.readouterr().err


def test_the_experiment_of_a_large_batch_runs(tmp_path: Path) -> None:
    """Those of recipes run in tests/recipes."""
    assert train("experiment=large_batch") == 0
    assert summary_of(the_run(tmp_path))["effective_batch"]["size"] == 32


class Odd(CodeLM):
    """Logs what JSON and a table cannot hold, and has a strategy of its own."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.accumulation = PerSample()
        self.confusion = BinaryConfusionMatrix()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.confusion(torch.tensor([0, 1]), torch.tensor([0, 1]))
        self.log("val/confusion", self.confusion, logger=False)
        self.log("val/worst", float("inf"))


def test_odd_metrics_and_a_strategy_of_the_modules_own(tmp_path: Path) -> None:
    odd = "model._target_=tests.cli.train.test_main.Odd"
    one = ["trainer.max_steps=1", "proof=off"]
    assert train(odd, *one, "accumulation=none", "data.batch_size=3") == 0
    kept = summary_of(the_run(tmp_path))
    assert kept["windows"]["weight"] == 12  # samples, and not tokens
    assert kept["unit"] == "samples"
    assert kept["metrics"]["val/worst"] is None
    assert kept["metrics"]["val/confusion"] is None


def test_a_scheduler_that_goes_by_a_metric(tmp_path: Path) -> None:
    # A threshold that nothing is good enough for.
    words = ["scheduler=plateau", "scheduler.patience=0", "+scheduler.threshold=1.0"]
    asked = [*words, "scheduling.interval=epoch", "scheduling.monitor=val/loss"]
    by_epoch = ["trainer.max_steps=-1", "trainer.max_epochs=2", "data.num_train=8"]
    small = [word for word in SMALL if "max_steps" not in word]
    assert train(*asked, *by_epoch, small=small) == 0
    assert summary_of(the_run(tmp_path))["learning_rates"][0] < 1e-3
