"""What an agent hands over becomes what the trial was started with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from trainkit.cli.sweep.whole_config import for_train, swept_arguments, without_swept
from trainkit.cli.words import completed
from trainkit.config._compat import VERSION_BASE

KNOWN = {"optimizer.lr", "optimizer.eps", "lr_scaling", "seed", "name", "experiment"}
LOGGED: dict[str, Any] = {
    "optimizer.lr": 1e-05,
    "lr_scaling": "sqrt",
    "seed": 0,
    "experiment": None,
    "name": "a,b",
    "optimizer": {"_target_": "torch.optim.AdamW", "lr": 1e-05, "eps": 1e-08},
    "callbacks": {"monitor": {"_target_": "trainkit.WindowMonitor"}},
    "effective_batch/samples": 64,
    "lr/0": 0.1,
    "paths": {"run_dir": "/old"},
    "ckpt_path": None,
    "_wandb": {"t": {"1": [1, 5]}},
}


def as_agent(
    arguments: dict[str, Any], folder: Path
) -> tuple[list[str], dict[str, str]]:
    """The words and the environment that `wandb agent` gives for arguments."""
    path = folder / "config.yaml"
    entries = {name: {"desc": None, "value": v} for name, v in arguments.items()}
    path.write_text(yaml.safe_dump({"wandb_version": 1, **entries}))
    words = [f"{name}={value}" for name, value in arguments.items()]
    return words, {"WANDB_SWEEP_ID": "s", "WANDB_SWEEP_PARAM_PATH": str(path)}


def test_a_resumed_trial_has_the_arguments_it_was_started_with(tmp_path: Path) -> None:
    # https://github.com/wandb/wandb/issues/9143
    words, env = as_agent(LOGGED, tmp_path)

    kept = swept_arguments(words, KNOWN.__contains__, environ=env)

    assert kept == [
        "optimizer.lr=1e-05",
        "lr_scaling=sqrt",
        "seed=0",
        "experiment=null",
        "name='a,b'",
    ]


def test_words_of_the_command_itself_stay(tmp_path: Path) -> None:
    words, env = as_agent(LOGGED, tmp_path)
    own = ["hydra.run.dir=x", "optimizer.lr=9", "+new.key=1", "--cfg", "nope=1", "-m"]

    kept = swept_arguments([*own, *words], KNOWN.__contains__, environ=env)

    assert kept[: len(own)] == own


def test_a_nested_parameter_becomes_dotted_overrides(tmp_path: Path) -> None:
    # https://github.com/wandb/wandb/issues/1427
    words, env = as_agent({"optimizer": {"lr": 0.1, "eps": 1e-08}}, tmp_path)
    assert words == ["optimizer={'lr': 0.1, 'eps': 1e-08}"]

    kept = swept_arguments(words, KNOWN.__contains__, environ=env)

    assert sorted(kept) == ["optimizer.eps=1e-08", "optimizer.lr=0.1"]


def test_without_the_agents_file_the_words_themselves_are_read(tmp_path: Path) -> None:
    words, env = as_agent(LOGGED, tmp_path)
    del env["WANDB_SWEEP_PARAM_PATH"]

    kept = swept_arguments(words, KNOWN.__contains__, environ=env)

    assert kept[:4] == [
        "optimizer.lr=1e-05",
        "lr_scaling=sqrt",
        "seed=0",
        "experiment=null",
    ]
    assert "optimizer" not in [word.partition("=")[0] for word in kept]


def test_hydras_prefixes_stay(tmp_path: Path) -> None:
    words, env = as_agent({"optimizer.lr": 0.1, "lr/0": 1}, tmp_path)
    words = ["++" + word for word in words]

    kept = swept_arguments(words, KNOWN.__contains__, environ=env)

    assert kept == ["++optimizer.lr=0.1"]


def test_without_a_sweep_every_word_stays() -> None:
    words = ["lr/0=1", "optimizer={'lr': 1}", "a=None"]

    assert swept_arguments(words, KNOWN.__contains__, environ={}) == words


def test_the_train_door_takes_a_resumed_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hydra import compose, initialize_config_module

    words, env = as_agent({**LOGGED, "lr_scaling.rule": "none"}, tmp_path)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    fixed = ["logger=csv", "lr_scaling.reference_batch=32"]

    kept = for_train([*fixed, *words])

    # Its own group is chosen among the swept arguments: both are needed to compose.
    with initialize_config_module("trainkit.conf", **VERSION_BASE):
        config = compose("train", completed(kept))
    assert config.optimizer.lr == 1e-05
    assert config.optimizer.eps == 1e-08
    assert config.lr_scaling.rule == "none"
    assert config.name == "a,b"


def test_what_the_sweep_owns_is_not_logged_again(tmp_path: Path) -> None:
    _, env = as_agent({"lr_scaling": "sqrt", "optimizer.lr": 0.1}, tmp_path)
    config = {"lr_scaling": {"rule": "sqrt"}, "optimizer": {"lr": 0.1}, "seed": 0}

    assert without_swept(config, environ=env) == {"optimizer": {"lr": 0.1}, "seed": 0}
    assert without_swept(config, environ={}) == config
