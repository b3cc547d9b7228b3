"""Differences between Hydra 1.3 and 1.4."""

from __future__ import annotations

import inspect
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import hydra
from hydra._internal.sources_registry import SourcesRegistry
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

_IS_OLDER = tuple(map(int, hydra.__version__.split(".")[:2])) < (1, 4)

VERSION_BASE: dict[str, Any] = {"version_base": "1.3"} if _IS_OLDER else {}
"""Arguments for `hydra.main` and similar functions; the defaults of Hydra 1.4."""

_OF_HYDRA = ("hydra.*", "hydra_plugins.*", "logging.*")


def hydra_arguments() -> ArgumentParser:
    """The parser of Hydra's own options and of `overrides`."""
    return get_args_parser()


def register_resolver(
    name: str, function: Callable[..., Any], *, use_cache: bool = False
) -> None:
    """Register the resolver `${name:...}`, also in place of an earlier one."""
    register: Any = OmegaConf.register_new_resolver
    newer: Any = getattr(OmegaConf, "register_resolver", None)
    if newer is not None and "use_cache" in inspect.signature(newer).parameters:
        register = newer  # OmegaConf 2.3 has another function with this name
    register(name, function, use_cache=use_cache, replace=True)


def store(name: str, node: Any) -> None:
    """Put a schema where Hydra finds it; a second call has no effect."""
    stores: Any = ConfigStore.instance()
    accepts = "replace" in inspect.signature(stores.store).parameters
    stores.store(
        name, node, provider="trainkit", **({"replace": True} if accepts else {})
    )


@contextmanager
def without_group(package: str, name: str) -> Iterator[None]:
    """Make Hydra list no group for a folder of a package that holds other files."""
    source: Any = SourcesRegistry.instance().resolve("pkg")
    before = source.list

    def others(self: Any, config_path: str, *args: Any, **kwargs: Any) -> list[str]:
        found = before(self, config_path, *args, **kwargs)
        is_here = self.path == package and not config_path
        return [each for each in found if not (is_here and each == name)]

    source.list = others
    try:
        yield
    finally:
        source.list = before


def main_options(packages: Sequence[str]) -> dict[str, Any]:
    """The options of `hydra.main` that do not concern the place of the configuration.

    Args:
        packages: packages whose classes Hydra itself may make, such as its callbacks.
    """
    options = dict(VERSION_BASE)
    if "execution_whitelist" in inspect.signature(hydra.main).parameters:
        allowed = [f"{package}.*" for package in packages]
        options["execution_whitelist"] = [*_OF_HYDRA, *allowed]
    return options
