"""The shipped sweeps run `trainkit train` itself, with and without a server."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.sweep.helpers import REPOSITORY, command, private_env, read_trials, run
from tests.startup import forked
from tests.wandb_server import WandbServer

SHORT = [
    "trainer.max_steps=3",
    "data.max_length=64",
    "data.num_train=120",
    "data.num_val=16",
    "model.d_model=8",
    "model.num_heads=1",
    "trainer.val_check_interval=${trainer.accumulate_grad_batches}",
    "callbacks=none",
]


def shortened(name: str, folder: Path, **parameters: list[Any]) -> Path:
    """A shipped sweep, the training cut to three steps, and fewer values."""
    config = yaml.safe_load((REPOSITORY / "conf" / "sweep" / name).read_text())
    for key, values in parameters.items():
        config["parameters"][key.replace("__", ".")] = {"values": values}
    config["command"][-1:] = [*SHORT, "${args_no_hyphens}"]
    path = folder / name
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.mark.slow
def test_the_law_makes_micro_batches_of_one_rate_train_alike_with_and_without_a_server(
    wandb_server: WandbServer, tmp_path: Path
) -> None:
    pytest.importorskip("optuna")
    name = "lr_batch.yaml"
    shortened(name, tmp_path, optimizer__lr=[0.003, 0.01], data__batch_size=[8])
    words = command(name, "--offline", "--agents", "2", "--json")
    done = run(words, private_env(tmp_path), tmp_path)

    assert done.returncode == 0, done.stderr
    trials = json.loads(done.stdout)["trials"]
    losses = {t["arguments"]["optimizer.lr"]: t["value"] for t in trials}
    for trial in read_trials(tmp_path / "sweeps"):
        summary = json.loads((Path(trial["folder"]) / "summary.json").read_text())
        assert summary["status"] == "finished"

    # W&B's own commands run the same file.
    shortened(name, tmp_path, optimizer__lr=[0.003], data__batch_size=[32])
    env = wandb_server.env(tmp_path, **forked())
    wandb = [sys.executable, "-m", "wandb"]
    assert run([*wandb, "sweep", name], env, tmp_path).returncode == 0
    run([*wandb, "agent", "local/p/sw0"], env, tmp_path)

    (received,) = wandb_server.runs.values()
    assert received.state == "finished"
    assert received.summary["val/loss"] == pytest.approx(losses[0.003], rel=1e-5)
    assert abs(losses[0.01] - losses[0.003]) > 1e-3  # the control
