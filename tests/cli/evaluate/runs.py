"""Small runs in this process, and the commands that evaluate them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra

from tests.cli.training import the_run, train
from trainkit.cli.main import main

OWN = "tests.cli.ones_own"
EPOCHS = [
    "trainer.max_epochs=4",
    "trainer.log_every_n_steps=1",
    "report=false",
    "name=run",
]


def trained(
    where: Path, *words: str, model: str = "Net", data: str = "Data", status: int = 0
) -> Path:
    classes = [f"model._target_={OWN}.{model}", f"data._target_={OWN}.{data}"]
    assert _status(lambda: train(*classes, *words, small=EPOCHS)) == status
    return the_run(where)


def trainkit(*words: Any) -> int:
    GlobalHydra.instance().clear()
    return _status(lambda: main([str(word) for word in words]))


def result(run: Path, verb: str) -> dict[str, Any]:
    return json.loads((run / f"{verb}.json").read_text())


def files(folder: Path) -> dict[str, bytes]:
    """All files below a folder with their content, without locks."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


def _status(call: Callable[[], int]) -> Any:
    try:
        return call()
    except SystemExit as end:  # after a signal
        return end.code
