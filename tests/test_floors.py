"""Dependencies point one way, and only the private names that are listed are used."""

from __future__ import annotations

import ast
import functools
import os
import re
import sys
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from torch import nn

import trainkit
from tests.startup import CHILD_PATH, ended

ROOT = Path(trainkit.__file__).parent


def imports() -> dict[str, set[str]]:
    """For each module, those of trainkit that it imports, also for types alone.

    The packages' own files are left out: they name what they export, and load none.
    """
    modules = {
        ".".join(path.relative_to(ROOT.parent).with_suffix("").parts): path
        for path in ROOT.rglob("*.py")
        if path.name != "__init__.py"
    }
    return {
        name: (_imported_by(path) & set(modules)) - {name}
        for name, path in modules.items()
    }


@functools.cache
def _imported_by(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{each.name}" for each in node.names)
    return found


def between_folders(package: str) -> dict[str, set[str]]:
    """For each folder of a package, or file that stands beside them, those it needs."""
    depth = package.count(".") + 1
    folders: dict[str, set[str]] = {}
    for name, needed in imports().items():
        if name.startswith(f"{package}."):
            own = folders.setdefault(name.split(".")[depth], set())
            own.update(
                other.split(".")[depth]
                for other in needed
                if other.startswith(f"{package}.")
            )
    return {folder: needed - {folder} for folder, needed in folders.items()}


# ---- each floor loads nothing of those above it --------------------------------------


HEAVY = """
torch lightning pytorch_lightning hydra omegaconf wandb torchmetrics jsonargparse
""".split()
PACKAGES = ("core", "core.batch_norm", "data", "config", "cli", "cli.main", "cli.plan")
PACKAGES += ("cli.sweep.main",)
PLANS = ("effective_batch", "options", "scaling", "stages")
LIGHT = [
    "import trainkit.errors",
    "import trainkit; dir(trainkit)",
    *(f"import trainkit.{package}; dir(trainkit.{package})" for package in PACKAGES),
    *(f"from trainkit.core.plan.{module} import *" for module in PLANS),
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
        "from trainkit.lit import *; import trainkit.lit.resume.first_signal",
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
    """The control: one would be seen."""
    graph = imports()
    assert len(graph) > 150
    list(TopologicalSorter(graph).static_order())
    graph["trainkit.core.window"].add("trainkit.core.accumulator")
    with pytest.raises(CycleError):
        list(TopologicalSorter(graph).static_order())


@pytest.mark.parametrize("package", ["trainkit", "trainkit.lit", "trainkit.cli"])
def test_no_circle_between_folders(package: str) -> None:
    graph = between_folders(package)
    assert len(graph) > 5
    list(TopologicalSorter(graph).static_order())


FLOORS = ("trainkit.core", "trainkit.data", "trainkit.lit")


@pytest.mark.parametrize("package", ["trainkit", "trainkit.core.batch_norm", *FLOORS])
def test_every_public_name_resolves_and_is_the_same_at_the_top(package: str) -> None:
    """Once a submodule is imported, a name that it shares would stand for it."""
    module = import_module(package)
    assert sorted(module.__all__) == sorted(dir(module))
    for name in module.__all__:
        assert getattr(module, name).__name__ == name
        assert find_spec(f"{package}.{name}") is None
        if package in FLOORS:
            assert getattr(module, name) is getattr(trainkit, name)


def test_the_top_lists_what_a_beginner_needs_and_knows_the_rest() -> None:
    assert len(dir(trainkit)) == 22
    assert "MetricsCSVLogger" not in dir(trainkit)
    assert trainkit.MetricsCSVLogger.__name__ == "MetricsCSVLogger"
    assert trainkit.WandbRunLogger.__name__ == "WandbRunLogger"
    with pytest.raises(AttributeError, match="No trainkit attribute Nothing"):
        _ = trainkit.Nothing  # type: ignore[attr-defined]


# ---- private names: those that CONTRIBUTING.md lists are those that are used ---------


REPOSITORY = ROOT.parent
MODULES_OWN = frozenset(vars(nn.Module()))


def private_names_of_torch() -> set[str]:
    """Those that stand in trainkit outside of every `_compat.py`."""
    found = set()
    for path in (REPOSITORY / "trainkit").rglob("*.py"):
        if path.name == "_compat.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                module, names = node.module or "", [alias.name for alias in node.names]
            elif isinstance(node, ast.Attribute):
                module, names = ast.unparse(node.value), [node.attr]
                if node.attr in MODULES_OWN and module != "self":
                    module = "torch"
            else:
                continue
            if module.partition(".")[0] in ("torch", "lightning", "hydra", "wandb"):
                found |= {name for name in names if re.match("_[^_]", name)}
    return found


def test_private_names_that_contributing_excepts_are_those_there_are() -> None:
    page = (REPOSITORY / "CONTRIBUTING.md").read_text()
    excepted = page.partition("of torch stand elsewhere")[2]
    named = re.findall(r"`(_\w+)`", excepted.partition("\n\n")[0])
    assert set(named) == private_names_of_torch()
