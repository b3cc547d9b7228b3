"""A recipe's training, small and short, run in this process."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from tests.cli.training import summary_of, the_run, train

SMALL = {
    "batch_size": "data.max_length=16 data.num_train=320 data.num_val=32 "
    "model.d_model=8 model.num_layers=1",
    "code_lm": "data.vocab_size=300 data.num_train=128 data.num_val=16 "
    "data.max_length=64 model.d_model=16 model.num_layers=1",
    "completions": "data.vocab_size=300 data.num_train=64 data.num_val=8 "
    "data.max_length=96 model.hidden_size=16 model.num_layers=1 model.num_heads=1",
    "contrastive": "data.batch_size=32 data.num_train=64 data.num_val=32 model.width=4 "
    "micro_batching.size=8",
    "digits_bn": "data.num_train=34 data.num_val=32 model.width=4 "
    "schedule.sizes={0:4,4:2,6:1}",
    "gan": "data.batch_size=8 data.num_train=42 data.num_val=16 model.width=8",
    "masked_lm": "data.tokens=200 data.vocab_size=300 data.num_train=20 data.num_val=8 "
    "data.max_length=64 model.hidden_size=16 model.num_layers=1 model.num_heads=1",
    "moe": "data.batch_size=16 data.length=16 data.num_train=64 data.num_val=16 "
    "model.width=8 model.num_heads=2 model.num_experts=4",
    "multi_term": "data.batch_size=16 data.num_train=64 data.num_val=16 model.width=8",
    "packed_lm": "data.vocab_size=300 data.num_train=64 data.num_val=8 "
    "data.max_length=96 data.batch_size=32 model.hidden_size=16 model.num_layers=1 "
    "model.num_heads=1 micro_batching.tokens=900",
    "ragged_regression": "data.num_train=58 data.num_val=16 model.width=4",
    "segmentation": "data.batch_size=8 data.num_train=28 data.num_val=8 data.side=16 "
    "model.width=2 micro_batching.size=3",
}
"""Words with which a recipe's training takes no time."""

QUICK = ["report=false", "callbacks.best=null"]


def small(name: str, *, epochs: int | None = None) -> list[str]:
    """The words of a recipe's small training.

    Args:
        name: of the recipe.
        epochs: how many to train; None takes a few steps, as `debug=default` does.
    """
    # Anomalies are looked for by a stack of a hundred calls at each operation.
    end = ["debug=default", "trainer.detect_anomaly=false"] if epochs is None else [
        f"trainer.max_epochs={epochs}",
        "trainer.val_check_interval=1.0",
        "trainer.check_val_every_n_epoch=1",
        "trainer.log_every_n_steps=1",
    ]  # fmt: skip
    return [f"experiment={name}", *SMALL[name].split(), *end]


def run_debug(name: str, where: Path, *overrides: str) -> dict[str, Any]:
    """Take a few steps of a recipe in the current folder and return its metrics."""
    assert train(*small(name), *overrides, small=QUICK) == 0
    return metrics_of(the_run(where))


def metrics_of(run: Path) -> dict[str, Any]:
    """Those of a run's end; it has logged rows."""
    with (run / "metrics.csv").open() as file:
        assert list(csv.DictReader(file))
    return summary_of(run)["metrics"]
