"""What differs between releases of Hydra."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import hydra
import pytest
from hydra import compose, initialize
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from tests.environments import install
from trainkit.config._compat import (
    VERSION_BASE,
    hydra_arguments,
    main_options,
    register_resolver,
    store,
    without_group,
)
from trainkit.config.conf import register


@dataclass
class Schema:
    size: int = 1


def test_hydras_own_options() -> None:
    parser = hydra_arguments()
    args = parser.parse_args(["--cfg", "job", "-cd", "conf", "-m", "seed=1"])
    assert (args.cfg, args.config_dir, args.multirun) == ("job", "conf", True)
    assert args.overrides == ["seed=1"]


def test_a_resolver_takes_the_place_of_one_of_its_name() -> None:
    for value in (1, 2):
        register_resolver("test.compat", lambda value=value: value)
        assert OmegaConf.create({"a": "${test.compat:}"}).a == value
    OmegaConf.clear_resolver("test.compat")


def test_a_schema_may_be_stored_again() -> None:
    GlobalHydra.instance().clear()
    for _ in range(2):
        store("test_compat_schema", Schema)
    with initialize(config_path=None, **VERSION_BASE):
        assert compose("test_compat_schema") == {"size": 1}
    del ConfigStore.instance().repo["test_compat_schema.yaml"]


def test_what_hydra_main_is_told() -> None:
    options = main_options(["mine"])
    assert hydra.main(config_path=None, **options)  # it takes them all
    if "execution_whitelist" in options:
        assert "mine.*" in options["execution_whitelist"]
    else:
        assert options == {"version_base": "1.3"}


def test_one_folder_of_one_package_is_listed_as_no_group() -> None:
    GlobalHydra.instance().clear()
    register()
    groups: list[list[str]] = []
    with initialize(config_path=None, **VERSION_BASE):
        loader = GlobalHydra.instance().config_loader()
        for package in ("trainkit.conf", "another.package"):
            with without_group(package, "sweep"):
                groups.append(loader.list_groups(""))
        assert "sweep" in loader.list_groups("")  # as it was before
    hidden, listed = groups
    assert set(listed) - set(hidden) == {"sweep"}


ROOT = Path(__file__).parents[2]
PACKAGES = ["hydra-core==1.4.0rc3", "omegaconf==2.4.1rc1"]
TESTS = [
    "tests/config/test_conf.py::test_a_strategy_reaches_a_module_of_either_kind",
    "tests/config/test_targets.py",
    "tests/cli/train/test_mistakes.py::test_places_with_odd_names",
    "tests/cli/train/test_mistakes.py::test_a_refusal_is_not_said_twice",
]
OF_OTHERS = "ignore:register_new_resolver"  # a launcher calls it by its old name


@pytest.mark.environments
@pytest.mark.timeout(600)
def test_configurations_work_without_a_warning(tmp_path: Path) -> None:
    """Beside the installed one, so that nothing is changed by the test."""
    if "PYTHONPATH" in os.environ:
        pytest.skip("it is what runs now, or something else is wanted")
    if not install("--no-deps", "--target", str(tmp_path), *PACKAGES):
        pytest.skip("needs a package index")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        + ["-W", OF_OTHERS, *TESTS],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-4000:]
