"""The groups that trainkit ships, and how Hydra finds them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.plugins.search_path_plugin import SearchPathPlugin
from lightning.pytorch import Trainer
from omegaconf import DictConfig, OmegaConf
from trainkit.recipes.code_lm import CodeLM  # type: ignore[import-not-found]

from trainkit import AccumulationCallback, PerToken, TrainkitError
from trainkit.config import conf_dir, register
from trainkit.config._compat import VERSION_BASE
from trainkit.config.build import build
from trainkit.config.check import check_all
from trainkit.config.conf import TrainkitSearchPath, accumulate
from trainkit.config.targets import TARGET, locate

register()

GROUPS = sorted(
    path.name for path in conf_dir().iterdir() if path.is_dir() and path.name[0] != "_"
)
OPTIONS = sorted(
    (path.parent.name, path.stem)
    for path in conf_dir().glob("*/*.yaml")
    if path.parent.name != "sweep"
)


@pytest.fixture(autouse=True)
def no_hydra_is_left() -> Iterator[None]:
    yield
    GlobalHydra.instance().clear()


def composed(*overrides: str, run_dir: str = "/tmp/run") -> DictConfig:
    """A configuration; the demo's, if no experiment is chosen."""
    if not any(word.startswith("experiment=") for word in overrides):
        overrides = ("experiment=demo", *overrides)
    with initialize_config_module("trainkit.conf", **VERSION_BASE):
        return compose("train", [f"paths.run_dir={run_dir}", *overrides])


@pytest.fixture(scope="module")
def demo() -> DictConfig:
    """The demo's configuration, to be copied and changed: composing takes long."""
    return composed()


class Optimized(CodeLM):
    """Has an optimizer of its own."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


# What an option leaves open has to be said.
OPEN: dict[tuple[str, str], list[str]] = {
    ("lr_scaling", name): ["lr_scaling.reference_batch=32"]
    for group, name in OPTIONS
    if group == "lr_scaling" and name != "none"
}
OPEN["lr_scaling", "gain"] += ["lr_scaling.noise_scale=40"]
OPEN["accumulation", "per_class_weight"] = ["accumulation.weight=[1.0,2.0]"]
OPEN["schedule", "stages"] = ["schedule.sizes={0: 2, 5: 4}"]
OPEN["schedule", "by_tokens"] = ["schedule.sizes={0: 2, 9000: 4}"]
OPEN["micro_batching", "size"] = ["micro_batching.size=4"]
OPEN["micro_batching", "tokens"] = ["micro_batching.tokens=4096"]
OPEN["optimizer", "none"] = ["scheduler=none"]
OPEN["optimizer", "none"] += ["model._target_=tests.config.test_conf.Optimized"]
OPEN["model", "own"] = ["model._target_=trainkit.recipes.code_lm.CodeLM"]
OPEN["data", "own"] = ["data._target_=trainkit.recipes.code_lm.Functions"]
# A recipe's model and data go together: its experiment chooses both.
OPEN |= {
    (group, name): [f"experiment={name}"]
    for group, name in OPTIONS
    if group in ("model", "data") and ("experiment", name) in OPTIONS
}
for own in ("completions", "packed_lm"):  # they have a strategy of their own
    OPEN["model", own] = ["accumulation=none"]


def test_the_groups_of_a_clone_that_is_not_installed_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "hydra_plugins", None)
    monkeypatch.setattr(Singleton, "_instances", {})
    assert not Plugins.instance().discover(SearchPathPlugin)
    register()
    assert Plugins.instance().discover(SearchPathPlugin) == [TrainkitSearchPath]


@pytest.mark.parametrize("option", [o for group, o in OPTIONS if group == "trainer"])
def test_every_trainer_fits_its_target(option: str) -> None:
    """As it stands; the other groups are checked when they become objects, below."""
    check_all(composed(f"trainer={option}"))


def test_every_group_of_the_list_is_there() -> None:
    assert set(GROUPS) == {
        "accumulation", "micro_batching", "lr_scaling", "batchnorm", "schedule",
        "model", "data",
        "optimizer", "scheduler", "trainer", "logger", "callbacks", "experiment",
        "debug", "hparams_search", "paths", "sweep",
    }  # fmt: skip


WITH_ARGUMENTS = ("accumulation", "micro_batching", "lr_scaling", "batchnorm", "model")
LISTED = [each for each in OPTIONS if each[0] in WITH_ARGUMENTS]


@pytest.mark.parametrize(("group", "option"), [*LISTED, ("logger", "wandb")])
def test_an_option_lists_every_argument_with_its_default(
    group: str, option: str
) -> None:
    """Defaults in a file do not drift from those of the code; models have their own."""
    node: Any = OmegaConf.load(conf_dir() / group / f"{option}.yaml")
    if not node or option == "own":
        assert option in ("none", "own")
        return
    node = node[option] if group == "logger" else node
    parameters = inspect.signature(locate(node[TARGET])).parameters
    if group != "batchnorm":
        assert list(node) == [TARGET, *parameters]
    values: Any = OmegaConf.to_container(node)
    for name, value in values.items() if group != "model" else ():
        is_open = value == "???" or str(value).startswith("${")
        if name not in (TARGET, "rule", "policy", option) and not is_open:
            default = parameters[name].default
            assert value in (default, list(default) if default == () else None), name


def test_the_trainer_has_the_defaults_of_lightning() -> None:
    theirs = inspect.signature(Trainer.__init__).parameters
    expected = {
        name: parameter.default
        for name, parameter in theirs.items()
        if name not in ("self", "logger", "callbacks")
    }
    node: Any = OmegaConf.load(conf_dir() / "train.yaml")
    ours: Any = OmegaConf.to_container(node.trainer, resolve=False)
    own = {TARGET: "lightning.pytorch.Trainer", "enable_model_summary": False}
    assert ours == {**expected, **own, "default_root_dir": "${paths.run_dir}"}


def test_an_experiment_says_how_to_run_it() -> None:
    for path in (conf_dir() / "experiment").glob("*.yaml"):
        lines = path.read_text().splitlines()
        assert lines[:2] == [
            "# @package _global_",
            f"# trainkit train experiment={path.stem}",
        ]


@pytest.mark.parametrize("option", ["stages", "by_tokens"])
def test_the_stages_are_those_of_the_command_line(
    option: str, demo: DictConfig
) -> None:
    """A dict in the file would be merged into: its own stages would stay."""
    config = composed(f"schedule={option}", "schedule.sizes={0:1,3:2}")
    assert config.schedule.sizes == {0: 1, 3: 2}
    sizes = [each.trainer.accumulate_grad_batches for each in (config, demo)]
    assert sizes == [1, 4]  # a schedule sets the size of windows
    check_all(config)


def test_what_an_option_leaves_open_must_be_given() -> None:
    text = r"^schedule\.sizes: must be given"
    config = composed("lr_scaling=linear", "schedule=stages")
    with pytest.raises(TrainkitError, match=text):
        check_all(config)
    config.schedule.sizes = {0: 2}
    text = r"^lr_scaling\.reference_batch: must be given. Add lr_scaling\.ref"
    with pytest.raises(TrainkitError, match=text):
        check_all(config)


def test_a_users_application_uses_the_groups(tmp_path: Path) -> None:
    (tmp_path / "app.yaml").write_text(
        "defaults:\n  - /accumulation: per_token\n  - _self_\nmine: 1\n"
    )
    with initialize_config_dir(str(tmp_path), **VERSION_BASE):
        config = compose("app", ["accumulation=per_sample", "accumulation.size=x"])
    assert config.accumulation == {
        "_target_": "trainkit.PerSample",
        "size": "x",
        "mask": None,
        "documents": "auto",
        "loss_reduction": "mean",
    }


def test_accumulation_for_a_fixed_effective_batch() -> None:
    assert [accumulate(64, size) for size in (1, 8, 64)] == [64, 8, 1]
    assert accumulate(64, 8, 4) == 2
    for wrong in ((64, 12), (64, 1, 3), (0, 1), (64, 0), (-64, -8), (64, 1, 0)):
        with pytest.raises(TrainkitError, match=f"at least 1, received {wrong[1]} x"):
            accumulate(*wrong)


# Options that do not depend on each other are built together: the first of each of
# these groups, the second, ... Some begin at the sixth, where no other scheduler is. An
# experiment goes with its model and its data.
TOGETHER = (
    *("accumulation", "batchnorm", "lr_scaling", "schedule", "scheduler"),
    *("micro_batching", "logger", "callbacks", "paths"),
)
LATER = ("optimizer", "trainer", "debug")
OF_EXPERIMENTS = ("experiment", "model", "data")
CHOICES = [
    *zip_longest(
        *([o for o in OPTIONS if o[0] == group] for group in TOGETHER),
        *(
            [None] * 5 + [o for o in OPTIONS if o[0] == group and o[1] != "fsdp"]
            for group in LATER
        ),
    ),
    *(
        [(group, name) for group in OF_EXPERIMENTS if (group, name) in OPTIONS]
        for name in sorted({name for group, name in OPTIONS if group in OF_EXPERIMENTS})
    ),
    [("trainer", "fsdp")],
    [("hparams_search", "optuna")],
]


def test_every_option_is_chosen() -> None:
    assert {option for chosen in CHOICES for option in chosen if option} == set(OPTIONS)


@pytest.mark.parametrize("chosen", CHOICES, ids=str)
def test_every_option_becomes_objects(
    chosen: Sequence[tuple[str, str] | None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setenv("TRAINKIT_ALLOW", "tests")
    options = [option for option in chosen if option]
    if ("hparams_search", "optuna") in options:  # in an environment of its own
        pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    overrides = [f"{group}={name}" for group, name in options]
    overrides += {each: None for option in options for each in OPEN.get(option, [])}
    if any(group == "trainer" for group, _ in options):
        overrides += ["trainer.accelerator=cpu", "trainer.devices=1"]
    config = composed(*dict.fromkeys(overrides), run_dir=str(tmp_path))
    if options == [("trainer", "fsdp")]:
        with pytest.raises(TrainkitError, match="trainer: .* requires a GPU"):
            build(config)
        return
    training = build(config)
    trainer: Any = training.trainer
    assert len(trainer.loggers) == len(config.logger or ())
    made = {type(callback).__name__ for callback in trainer.callbacks}
    expected = {
        "batchnorm": "BatchNormGuard",
        "lr_scaling": "LRScaling",
        "schedule": "AccumulationSchedule",
    }
    for group, name in options:
        if group in expected:
            assert (expected[group] in made) is (name != "none")


def test_a_strategy_reaches_a_module_of_either_kind(tmp_path: Path) -> None:
    config = composed("accumulation.ignore_index=-7", run_dir=str(tmp_path))
    training = build(config)
    assert training.module.accumulation == PerToken(ignore_index=-7)
    callbacks: Any = training.trainer.callbacks  # type: ignore[attr-defined]
    made = [c for c in callbacks if type(c) is AccumulationCallback]
    assert made == []
