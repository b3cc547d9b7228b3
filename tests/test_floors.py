"""Dependencies point one way: each floor loads nothing of those above it."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec

import pytest

import trainkit

HEAVY = [
    "torch",
    "lightning",
    "pytorch_lightning",
    "hydra",
    "omegaconf",
    "wandb",
    "torchmetrics",
    "jsonargparse",
]
ABOVE_CORE = [name for name in HEAVY if name != "torch"]


def loaded_by(program: str) -> set[str]:
    """Which of the heavy packages a fresh process has loaded after a program."""
    program = f"{program}\nimport sys\nprint('loaded:', *sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    modules = done.stdout.rpartition("loaded:")[2].split()
    return {name.partition(".")[0] for name in modules} & set(HEAVY)


@pytest.mark.parametrize(
    "package",
    [
        "trainkit",
        "trainkit.core",
        "trainkit.core.batch_norm",
        "trainkit.data",
        "trainkit.config",
        "trainkit.config.translate",
        "trainkit.cli",
        "trainkit.cli.main",
        "trainkit.cli.plan",
        "trainkit.cli.sweep.main",
        "trainkit.errors",
    ],
)
def test_importing_a_package_loads_nothing_heavy(package: str) -> None:
    assert loaded_by(f"import {package}; dir({package})") == set()


@pytest.mark.parametrize(
    "module",
    [
        "batch_plan",
        "effective",
        "epoch_plan",
        "scaling",
        "stages",
        "whole",
        "window_size",
    ],
)
def test_plain_arithmetic_loads_nothing_heavy(module: str) -> None:
    assert loaded_by(f"from trainkit.core.{module} import *") == set()


def test_core_loads_torch_alone() -> None:
    use = """
import torch
from trainkit.core import *
from trainkit.core.batch_norm import *
from trainkit import PerSample, TrainkitError
model = torch.nn.Linear(2, 1)
accumulator = Accumulator(PerSample(), module=model)
x = torch.ones(3, 2)
accumulator.backward(model(x).mean(), x)
accumulator.state_dict()
accumulator.finish(model.parameters())
"""
    assert loaded_by(use) == {"torch"}


def test_data_loads_torch_alone() -> None:
    assert loaded_by("from trainkit.data import *") == {"torch"}


def test_lit_knows_no_configuration() -> None:
    loaded = loaded_by("from trainkit.lit import *; import trainkit.lit.graceful_stop")
    assert not loaded & {"hydra", "omegaconf", "wandb", "jsonargparse"}


def test_configuration_knows_no_tracker() -> None:
    assert "wandb" not in loaded_by("import trainkit.config.build")


def test_loading_is_noticed() -> None:
    """The control."""
    assert "torch" in loaded_by("import torch")


@pytest.mark.parametrize(
    "package",
    [
        "trainkit",
        "trainkit.core",
        "trainkit.core.batch_norm",
        "trainkit.data",
        "trainkit.lit",
    ],
)
def test_every_public_name_resolves(package: str) -> None:
    """Once a submodule is imported, a name that it shares would stand for it."""
    module = import_module(package)
    assert sorted(module.__all__) == sorted(dir(module))
    for name in module.__all__:
        assert getattr(module, name).__name__ == name
        assert find_spec(f"{package}.{name}") is None


def test_names_of_core_and_data_are_the_same_at_the_top() -> None:
    for floor in map(import_module, ("trainkit.core", "trainkit.data")):
        for name in floor.__all__:
            assert getattr(floor, name) is getattr(trainkit, name)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'trainkit' has no attribute 'Nothing'"):
        _ = trainkit.Nothing  # type: ignore[attr-defined]
