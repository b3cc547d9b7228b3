"""Differences between Hydra 1.3 and 1.4, whose old forms 1.5 will not have."""

from __future__ import annotations

import inspect
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from typing import Any

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

_IS_OLDER = tuple(map(int, hydra.__version__.split(".")[:2])) < (1, 4)

VERSION_BASE: dict[str, Any] = {"version_base": "1.3"} if _IS_OLDER else {}
"""For `hydra.main` and its like; from 1.4 on the defaults are those."""

_OF_HYDRA = ("hydra.*", "hydra_plugins.*", "logging.*")


def hydra_arguments() -> ArgumentParser:
    """The parser of Hydra's own options, and of `overrides`."""
    return get_args_parser()


def register_resolver(
    name: str, function: Callable[..., Any], *, use_cache: bool = False
) -> None:
    """Make `${name:...}` known, in place of what had the name."""
    register: Any = OmegaConf.register_new_resolver
    newer: Any = getattr(OmegaConf, "register_resolver", None)
    if newer is not None and "use_cache" in inspect.signature(newer).parameters:
        register = newer  # OmegaConf 2.3 has an older function of that name
    register(name, function, use_cache=use_cache, replace=True)


def store(name: str, node: Any) -> None:
    """Put a schema of trainkit's where Hydra finds it; again is nothing."""
    stores: Any = ConfigStore.instance()
    accepts = "replace" in inspect.signature(stores.store).parameters
    stores.store(
        name, node, provider="trainkit", **({"replace": True} if accepts else {})
    )


def main_options(packages: Sequence[str]) -> dict[str, Any]:
    """Options of `hydra.main`, beyond the place of the configuration.

    Args:
        packages: those whose classes Hydra itself may make, such as its callbacks.
    """
    options = dict(VERSION_BASE)
    if "execution_whitelist" in inspect.signature(hydra.main).parameters:
        allowed = [f"{package}.*" for package in packages]
        options["execution_whitelist"] = [*_OF_HYDRA, *allowed]
    return options
