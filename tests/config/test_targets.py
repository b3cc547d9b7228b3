"""A configuration file is not a licence to run anything."""

from __future__ import annotations

import functools
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import hydra.utils
import pytest
from hydra.errors import HydraException
from omegaconf import OmegaConf

import trainkit
from trainkit import PerToken, TrainkitError
from trainkit.config import allow_targets, instantiate
from trainkit.config import targets as module
from trainkit.config.targets import VARIABLE, allowed, nodes_with_target


@pytest.fixture(autouse=True)
def nothing_more_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(module, "_allowed", set())


def by_hydra(config: Any) -> Any:
    """Its own `instantiate`, of which 1.4 warns where no list says what is allowed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return hydra.utils.instantiate(config)


def test_what_it_makes_is_what_hydra_makes() -> None:
    config = OmegaConf.create({"_target_": "trainkit.PerToken", "ignore_index": -1})
    made = instantiate(config)
    assert isinstance(made, PerToken)
    assert made == by_hydra(config)


def test_arguments_of_the_call_go_before_those_of_the_file() -> None:
    made = instantiate({"_target_": "trainkit.PerToken", "shift": False}, shift=True)
    assert made.shift is True


@pytest.mark.parametrize("path", ["trainkit", "trainkit.cli.wandb_logger"])
def test_the_wandb_logger_goes_by_both_its_names(path: str) -> None:
    config = {"_target_": f"{path}.WandbRunLogger", "mode": "disabled"}
    assert isinstance(instantiate(config), trainkit.WandbRunLogger)


def test_a_partial_and_plain_things() -> None:
    config = {"_target_": "torch.optim.SGD", "_partial_": True, "lr": 0.5}
    made = instantiate(config)
    assert isinstance(made, functools.partial)
    assert made.keywords == {"lr": 0.5}
    assert instantiate(None) is None


ATTACKS = [
    "os.system",
    "builtins.eval",
    "subprocess.Popen",
    "torch.os.system",  # reached through an allowed package
    "torch.serialization.os.remove",
    "trainkit.config.run_name.uuid.uuid4",
    "lightning.pytorch.trainer.trainer.os.system",
    "torch.sys.path.append",  # a method, which names no module
    "torch.utils.collect_env.run",  # torch's own ways to run what it is given
    "torch.utils.cpp_extension.load_inline",
    "torch.hub.load",
    "torch.load",
    "trainkit.cli.sweep.offline.OfflineSweep",
    "trainkit.config.allow_targets",
    ".run",
]


@pytest.mark.parametrize("target", ATTACKS)
def test_other_packages_are_refused_and_nothing_runs(
    target: str, tmp_path: Path
) -> None:
    witness = tmp_path / "witness"
    config = {"_target_": target, "_args_": [f"touch {witness}"]}
    with pytest.raises(TrainkitError, match=rf"_target_: must name .* {target!r}"):
        instantiate(config)
    assert not witness.exists()


def test_hydra_alone_runs_what_it_has_no_name_for(tmp_path: Path) -> None:
    """The control: its list of forbidden targets cannot be complete."""
    witness = tmp_path / "witness"
    path = {"_target_": "pathlib.Path", "_args_": [str(witness)]}
    config = {"_target_": "pathlib.Path.touch", "_args_": [path]}
    with pytest.raises(TrainkitError, match=r"'pathlib\.Path\.touch'"):
        instantiate(config)
    assert not witness.exists()
    by_hydra(config)
    assert witness.exists()


@pytest.mark.parametrize(
    "hide",
    [
        lambda inner: {"_target_": "trainkit.Uniform", "extra": inner},
        lambda inner: {"_target_": "trainkit.Uniform", "extra": [1, {"a": inner}]},
        lambda inner: [inner],
        lambda inner: {"plain": {"deeper": inner}},
    ],
)
def test_a_target_is_found_wherever_it_stands(hide) -> None:
    config = OmegaConf.create(hide({"_target_": "os.getcwd"}))
    with pytest.raises(TrainkitError, match="'os.getcwd'"):
        instantiate(config)


def test_a_target_in_the_arguments_of_the_call_is_found() -> None:
    with pytest.raises(TrainkitError, match=r"extra\._target_"):
        instantiate({"_target_": "trainkit.Uniform"}, extra={"_target_": "os.getcwd"})


def test_an_interpolated_target_is_looked_at_as_it_resolves() -> None:
    config = OmegaConf.create({"name": "getcwd", "node": {"_target_": "os.${name}"}})
    with pytest.raises(TrainkitError, match=r"'os\.getcwd'"):
        instantiate(config.node)


def test_the_way_to_allow_one_is_said_and_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = {"_target_": "collections.OrderedDict", "a": 1}
    with pytest.raises(TrainkitError, match="TRAINKIT_ALLOW=collections") as refused:
        instantiate(config)
    assert "allow_targets('collections')" in str(refused.value)
    monkeypatch.setenv(VARIABLE, "json, collections")
    assert instantiate(config) == {"a": 1}
    monkeypatch.delenv(VARIABLE)
    allow_targets("collections")
    assert instantiate(config) == {"a": 1}
    assert "collections" in allowed()


def test_a_part_of_a_package_can_be_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"_target_": "torch.distributions.Normal", "loc": 0.0, "scale": 1.0}
    with pytest.raises(TrainkitError, match="TRAINKIT_ALLOW=torch.distributions.norm"):
        instantiate(config)
    monkeypatch.setenv(VARIABLE, "torch.distributions")
    assert instantiate(config).scale == 1.0
    with pytest.raises(TrainkitError, match=r"is of 'torch\.hub'"):
        instantiate({"_target_": "torch.hub.load"})


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("trainkit.PerTokn", "PerTokn"),
        ("torch.optim.AdamX", "AdamX"),
        ("trainkit.nowhere.Thing", "nowhere"),
    ],
)
def test_a_target_that_is_not_there_is_named(
    target: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once: Hydra's own words, the control, are not logged beside ours."""
    logged: list[Any] = []
    log = logging.getLogger("hydra.utils")
    monkeypatch.setattr(log, "filters", [lambda record: logged.append(record)])
    with pytest.raises(TrainkitError, match=f"there is no '{target}'.*{reason}"):
        instantiate({"_target_": target})
    assert not logged
    with pytest.raises((HydraException, ImportError)):
        hydra.utils.get_object(target)
    assert logged


@pytest.mark.parametrize("recipe", ["gan.DigitsGAN", "completions.CompletionLM"])
def test_the_extra_that_a_recipe_needs_is_named(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, _, _ = recipe.partition(".")
    for loaded in [each for each in sys.modules if "recipes" in each]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.delattr(trainkit, "recipes", raising=False)  # an earlier test's
    for package in ("sklearn.datasets", "tokenizers"):
        monkeypatch.setitem(sys.modules, package, None)  # as if it were not there
    with pytest.raises(
        TrainkitError, match=r"^_target_: .*'lightning-trainkit\[recipes\]'$"
    ):
        instantiate({"_target_": f"trainkit.recipes.{recipe}"})
    assert f"trainkit.recipes.{name}" not in sys.modules


def test_targets_are_listed_with_their_keys() -> None:
    config = OmegaConf.create(
        {"a": {"_target_": "x.Y", "b": [{"_target_": "z"}]}, "c": None, "d": "???"}
    )
    assert list(nodes_with_target(config)) == [
        ("a", {"_target_": "x.Y", "b": [{"_target_": "z"}]}),
        ("a.b[0]", {"_target_": "z"}),
    ]
