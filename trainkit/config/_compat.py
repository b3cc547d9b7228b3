"""What of Hydra is private or repeated: its parser, its version, resolvers, a group."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hydra._internal.sources_registry import SourcesRegistry
from hydra._internal.utils import get_args_parser
from omegaconf import OmegaConf

VERSION_BASE: dict[str, Any] = {"version_base": "1.3"}
"""Arguments for `hydra.main` and similar functions: the newest defaults."""


def hydra_arguments() -> ArgumentParser:
    """The parser of Hydra's own options and of `overrides`."""
    return get_args_parser()


def register_resolver(
    name: str, function: Callable[..., Any], *, use_cache: bool = False
) -> None:
    """Register the resolver `${name:...}`, also in place of an earlier one."""
    OmegaConf.register_new_resolver(name, function, use_cache=use_cache, replace=True)


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
