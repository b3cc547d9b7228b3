"""What an agent hands over becomes what the trial was started with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_module
from hydra.errors import HydraException

from trainkit.cli.sweep.whole_config import for_train, without_swept
from trainkit.cli.words import completed
from trainkit.config._compat import VERSION_BASE

LOGGED: dict[str, Any] = {
    "optimizer.lr": 1e-05,
    "lr_scaling": "sqrt",
    "lr_scaling.rule": "none",
    "seed": 0,
    "experiment": None,
    "schedule": "none",
    "name": "a,b",
    "optimizer": {"_target_": "torch.optim.AdamW", "lr": 1e-05, "eps": 1e-08},
    "callbacks": {"monitor": {"_target_": "trainkit.WindowMonitor"}},
    "effective_batch/samples": 64,
    "lr/0": 0.1,
    "paths": {"run_dir": "/old"},
    "ckpt_path": None,
    "_wandb": {"t": {"1": [1, 5]}},
}
SWEPT = [
    "optimizer.lr=1e-05",
    "lr_scaling='sqrt'",
    "lr_scaling.rule='none'",
    "seed=0",
    "schedule='none'",
    "name='a,b'",
]
OWN = ["hydra.run.dir=x", "optimizer.lr=9", "--cfg", "lr_scaling.reference_batch=32"]


@pytest.fixture
def as_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[dict[str, Any]], list[str]]:
    """Gives the words that `wandb agent` makes of arguments, in its environment."""
    path = tmp_path / "config.yaml"
    monkeypatch.setenv("WANDB_SWEEP_PARAM_PATH", str(path))
    monkeypatch.setenv("WANDB_SWEEP_ID", "s")

    def words(arguments: dict[str, Any]) -> list[str]:
        entries = {name: {"desc": None, "value": v} for name, v in arguments.items()}
        path.write_text(yaml.safe_dump({"wandb_version": 1, **entries}))
        return [f"{name}={value}" for name, value in arguments.items()]

    return words


@pytest.mark.parametrize(
    ("own", "arguments", "prefix", "kept"),
    [
        # https://github.com/wandb/wandb/issues/9143: a resumed trial has the arguments
        # with which it was started, and the command's own words stay.
        (OWN, LOGGED, "", [*OWN, *SWEPT]),
        # https://github.com/wandb/wandb/issues/1427
        (
            [],
            {"optimizer": {"lr": 0.1, "eps": 1e-08}},
            "",
            ["optimizer.lr=0.1", "optimizer.eps=1e-08"],
        ),
        ([], {"optimizer.lr": 0.1, "lr/0": 1}, "++", ["++optimizer.lr=0.1"]),
        ([], {"ckpt_path": None, "metric": None}, "", ["metric=null"]),
    ],
)
def test_trainkit_train_gets_what_the_sweep_has_set(
    as_agent: Callable[[dict[str, Any]], list[str]],
    own: list[str],
    arguments: dict[str, Any],
    prefix: str,
    kept: list[str],
) -> None:
    words = [prefix + word for word in as_agent(arguments)]
    found = for_train([*own, *words])
    assert found[: len(own)] == own
    assert sorted(found) == sorted(kept)
    with initialize_config_module("trainkit.conf", **VERSION_BASE):
        compose("train", completed([w for w in found if w != "--cfg"]))
        if arguments is LOGGED:  # the control
            with pytest.raises(HydraException):
                compose("train", completed(words))


def test_without_a_server_every_argument_is_the_sweeps(
    as_agent: Callable[[dict[str, Any]], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_SWEEP_ID")
    words = as_agent({"optimizer": {"lr": 0.1}, "nope": None})
    assert for_train(words) == ["optimizer.lr=0.1", "nope=null"]  # which Hydra refuses


def test_without_a_sweep_every_word_stays() -> None:
    words = ["lr/0=1", "optimizer={'lr': 1}", "a=None"]
    assert for_train(words) == words


def test_what_the_sweep_owns_is_not_logged_again(
    as_agent: Callable[[dict[str, Any]], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    as_agent({"lr_scaling": "sqrt", "optimizer.lr": 0.1})
    config = {"lr_scaling": {"rule": "sqrt"}, "optimizer": {"lr": 0.1}, "seed": 0}
    assert without_swept(config) == {"optimizer": {"lr": 0.1}, "seed": 0}
    monkeypatch.delenv("WANDB_SWEEP_PARAM_PATH")
    assert without_swept(config) == config
