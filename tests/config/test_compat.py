"""What differs between releases of Hydra; see also test_next_hydra.py."""

from __future__ import annotations

from dataclasses import dataclass

import hydra
from hydra import compose, initialize
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

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
