"""`trainkit train` in this process, small."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from hydra.core.global_hydra import GlobalHydra
from trainkit.recipes.code_lm import code_lm  # type: ignore[import-not-found]

from trainkit.cli.main import main

# They are the source of all of Python's library.
code_lm.read_functions = functools.cache(code_lm.read_functions)

SMALL = """
trainer.max_steps=2 trainer.val_check_interval=4 trainer.num_sanity_val_steps=0
trainer.log_every_n_steps=1 callbacks.checkpoint.every_n_train_steps=1 experiment=demo
data.max_length=128 data.num_train=64 data.num_val=8 data.batch_size=2 model.d_model=8
model.num_layers=1 model.num_heads=1 report=false
""".split()


def train(*overrides: str, small: Sequence[str] = SMALL) -> int:
    GlobalHydra.instance().clear()
    flags = [word for word in overrides if word.startswith("-")]
    rest = [word for word in overrides if not word.startswith("-")]
    return main(["train", *flags, *small, *rest])


def run_dirs(where: Path) -> list[Path]:
    return sorted(path.parent for path in where.rglob("overrides.yaml"))


def the_run(where: Path) -> Path:
    (found,) = run_dirs(where)
    return found


def summary_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "summary.json").read_text())


def weights_of(run: Path, name: str = "last.ckpt") -> dict[str, torch.Tensor]:
    checkpoint = torch.load(run / "checkpoints" / name, weights_only=False)
    return checkpoint["state_dict"]


def same_weights(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[name], other[name]) for name in one
    )
