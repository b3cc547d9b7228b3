"""The Lightning CLI in this process, with the modules of `lightning_user`."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from torch import Tensor

from tests.cli.fit.lightning_user import WINDOW, Data, Net
from tests.helpers import trainer, weights
from trainkit import AccumulationCallback, AccumulationStrategy
from trainkit.cli.fit.cli import TrainkitCLI

USER = "tests.cli.fit.lightning_user"
QUIET = {
    "accelerator": "cpu",
    "devices": 1,
    "max_epochs": 2,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accumulate_grad_batches": WINDOW,
}


def stand_alone(monkeypatch: Any, tmp_path: Path) -> None:
    """Let a test find and leave nothing outside of its own folder."""
    monkeypatch.syspath_prepend(str(tmp_path))
    # Lightning 2.6 calls jsonargparse 4.53 by old names; only a strict suite sees it.
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    for variable in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # seed_everything sets them
        monkeypatch.setenv(variable, "0")


def quiet(**more: Any) -> list[str]:
    options = {**QUIET, **more}
    words = [f"--trainer.{name}={str(v).lower()}" for name, v in options.items()]
    return ["--seed_everything=3", *words]


def make(*args: str, model: Any = Net, data: Any = Data, **options: Any) -> TrainkitCLI:
    """Everything but the training."""
    return TrainkitCLI(
        model,
        data,
        run=False,
        save_config_callback=None,
        args=[*quiet(), *args],
        **options,
    )


def fitted(*args: str, model: Any = Net) -> Tensor:
    return weights(fit(*quiet(), *args, model=model).model)


def fit(*args: str, model: Any = Net) -> TrainkitCLI:
    """Several in one folder, with no logger to number their saved configs."""
    options = {"save_config_kwargs": {"overwrite": True}}
    return TrainkitCLI(model, Data, args=["fit", *args], **options)


@functools.cache
def by_hand(strategy: AccumulationStrategy | None, *callbacks: Any) -> Tensor:
    module = Net()
    ours = [] if strategy is None else [AccumulationCallback(strategy)]
    run = trainer(
        1 if callbacks else WINDOW, max_epochs=2, callbacks=[*ours, *callbacks]
    )
    run.fit(module, datamodule=Data())
    return weights(module)


def strategy_of(cli: TrainkitCLI) -> AccumulationStrategy | None:
    found = only(cli, AccumulationCallback)
    return found[0].strategy if found else None


def callbacks_of(cli: TrainkitCLI) -> list[Any]:
    run: Any = cli.trainer
    return run.callbacks


def only(cli: TrainkitCLI, kind: type) -> list[Any]:
    return [c for c in callbacks_of(cli) if isinstance(c, kind)]


def written(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)
