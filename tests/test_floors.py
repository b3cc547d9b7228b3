"""Dependencies point one way: each floor loads nothing of those above it."""

from __future__ import annotations

import os
import sys
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

import trainkit
from tests.imports import between_folders, imports
from tests.startup import CHILD_PATH, ended

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
LIGHT = [
    "import trainkit.errors",
    "import trainkit; dir(trainkit)",
    *(
        f"import trainkit.{package}; dir(trainkit.{package})"
        for package in (
            "core",
            "core.batch_norm",
            "data",
            "config",
            "cli",
            "cli.main",
            "cli.plan",
            "cli.sweep.main",
        )
    ),
    *(
        f"from trainkit.core.plan.{module} import *"
        for module in ("effective_batch", "options", "scaling", "stages")
    ),
]
USE_OF_CORE = """
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


def loaded_by(*programs: str) -> list[set[str]]:
    """Which of the heavy packages a fresh process has loaded after each program."""
    show = "import sys\nprint('loaded:', *sys.modules)"
    lines = [line for program in programs for line in (program, show)]
    env = {**os.environ, "PYTHONPATH": CHILD_PATH}  # torchmetrics imports less
    done = ended([sys.executable, "-c", "\n".join(lines)], Path(), env)
    assert done.returncode == 0, done.stderr
    found = [
        {name.partition(".")[0] for name in line.split()[1:]} & set(HEAVY)
        for line in done.stdout.splitlines()
        if line.startswith("loaded:")
    ]
    assert len(found) == len(programs)
    return found


def test_importing_packages_and_plain_arithmetic_loads_nothing_heavy() -> None:
    loaded = dict(zip(LIGHT, loaded_by(*LIGHT), strict=True))
    assert {program: heavy for program, heavy in loaded.items() if heavy} == {}


@pytest.fixture(scope="module")
def floors() -> list[set[str]]:
    """What is loaded after each floor, from below, in one process."""
    return loaded_by(
        "from trainkit.data import *",
        USE_OF_CORE,
        "from trainkit.lit import *; import trainkit.lit.resume.graceful_stop",
        "import trainkit.config.build",
    )


def test_data_and_core_load_torch_alone(floors: list[set[str]]) -> None:
    """The control: that torch is loaded is seen."""
    assert floors[:2] == [{"torch"}, {"torch"}]


def test_lit_knows_no_configuration_and_configuration_no_tracker(
    floors: list[set[str]],
) -> None:
    lit, config = floors[2:]
    assert "lightning" in lit
    assert not lit & {"hydra", "omegaconf", "wandb", "jsonargparse"}
    assert "wandb" not in config


def test_no_circle_between_modules() -> None:
    graph = imports()
    assert len(graph) > 200
    list(TopologicalSorter(graph).static_order())


@pytest.mark.parametrize("package", ["trainkit", "trainkit.lit", "trainkit.cli"])
def test_no_circle_between_folders(package: str) -> None:
    graph = between_folders(package)
    assert len(graph) > 5
    list(TopologicalSorter(graph).static_order())


def test_a_circle_would_be_seen() -> None:
    graph = imports()
    graph["trainkit.core.window"].add("trainkit.core.accumulator")
    with pytest.raises(CycleError):
        list(TopologicalSorter(graph).static_order())


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


def test_names_of_the_floors_are_the_same_at_the_top() -> None:
    floors = ("trainkit.core", "trainkit.data", "trainkit.lit")
    for floor in map(import_module, floors):
        for name in floor.__all__:
            assert getattr(floor, name) is getattr(trainkit, name)


def test_the_top_lists_what_a_beginner_needs_and_knows_the_rest() -> None:
    assert len(dir(trainkit)) == 22
    assert "RunCheckpoint" not in dir(trainkit)
    assert trainkit.RunCheckpoint.__name__ == "RunCheckpoint"
    assert trainkit.WandbRunLogger.__name__ == "WandbRunLogger"


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="No trainkit attribute Nothing"):
        _ = trainkit.Nothing  # type: ignore[attr-defined]
