"""The run's configuration holds what training turned out to be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cli.wandb_runs import DATA, connect, fit
from tests.wandb_server import WandbServer
from trainkit import LRScaling, WandbRunLogger
from trainkit.cli.wandb_logger.facts import WandbFacts


@pytest.fixture
def config_of(
    wandb_server: WandbServer, private_wandb: Path, monkeypatch: pytest.MonkeyPatch
) -> Any:
    connect(wandb_server, monkeypatch, private_wandb)

    def train(*callbacks: Any, **options: Any) -> dict[str, Any]:
        fit(WandbRunLogger(save_dir=private_wandb), *callbacks, **options)
        (run,) = wandb_server.runs.values()
        return run.config

    return train


def test_effective_batch_and_rates_equal_those_of_the_training(config_of: Any) -> None:
    config = config_of(WandbFacts(), LRScaling("linear", reference_batch=8))
    batch = config["effective_batch"]
    assert (batch["samples"], batch["micro_batch_samples"]) == (16, 4)
    assert (batch["accumulate"], batch["replicas"]) == (4, 1)
    scaling = config["lr_scaling"]
    assert (scaling["k"], scaling["effective_batch"]) == (2, 16)
    rates = [scaling[f"optimizer_0/lr/{when}"] for when in ("before", "after")]
    assert rates == [0.5, 1.0]
    assert config["learning_rate"] == {"optimizer_0": [1.0]}


@pytest.mark.parametrize("epochs", [1, 4])
def test_tokens_are_measured_over_the_first_windows(
    config_of: Any, epochs: int
) -> None:
    """Three windows an epoch, fewer than are measured in all, or more."""
    tokens = sum(len(labels) for _, labels in DATA)
    batch = config_of(WandbFacts(), epochs=epochs)["effective_batch"]
    if epochs == 1:
        assert batch["micro_batch_tokens"] == pytest.approx(tokens / 10)
    assert batch["tokens"] == pytest.approx(4 * batch["micro_batch_tokens"])
