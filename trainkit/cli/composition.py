"""The configuration that a `trainkit train` command line composes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

from hydra import compose, initialize_config_dir, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

from trainkit.cli.words import (
    CONFIG_DIR,
    CONFIG_NAME,
    CONFIG_PATH,
    SEARCH_PATH,
    completed,
    key_of,
    option,
)
from trainkit.config._compat import VERSION_BASE
from trainkit.config.conf import found_first, register
from trainkit.errors import TrainkitError

LOOP = (
    "configuration: a file must not name itself in its defaults, and one does, maybe "
    "through others. A file of your own that has the name of one of trainkit's takes "
    "its place, so give it another name to build on it."
)
"""What is said of files that name each other in a circle."""


class Composition:
    """A configuration and the groups that it could choose from.

    Args:
        words: what follows `trainkit train`, in the order of `options_first`. Only
            options that say where configurations are have an effect.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self._words = completed(words)
        self._options: dict[str, list[str]] = {}
        register()

    @cached_property
    def config(self) -> DictConfig:
        with self._hydra() as (name, overrides):
            try:
                return compose(name, overrides)
            except RecursionError as error:
                raise TrainkitError(LOOP) from error

    def options(self, group: str) -> list[str]:
        """The options of a group, the user's own too; none for an unknown group."""
        if group not in self._options:
            with self._hydra() as (name, overrides):
                loader = GlobalHydra.instance().config_loader()
                where = [word for word in overrides if key_of(word) == SEARCH_PATH]
                found = loader.get_group_options(
                    group, config_name=name, overrides=where
                )
            self._options[group] = found
        return self._options[group]

    @contextmanager
    def _hydra(self) -> Iterator[tuple[str, list[str]]]:
        """Set up Hydra; gives the name of the root configuration, and the overrides."""
        overrides = [word for word in self._words if not word.startswith("-")]
        name = option(self._words, CONFIG_NAME) or "train"
        folder = option(self._words, CONFIG_DIR)
        path = option(self._words, CONFIG_PATH)
        if folder is not None and path is None and name != "train":
            # Hydra does not look for a root configuration in hydra.searchpath.
            folder, path = None, folder
        GlobalHydra.instance().clear()
        with (
            found_first(folder),
            (
                initialize_config_module("trainkit.conf", **VERSION_BASE)
                if path is None
                else initialize_config_dir(str(Path(path).absolute()), **VERSION_BASE)
            ),
        ):
            yield name, overrides
