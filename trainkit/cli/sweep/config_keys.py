"""The keys of `trainkit train`, checked before a sweep is created."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from trainkit.cli.sweep.command import fixed_words
from trainkit.cli.sweep.sweep_file import SweepFile
from trainkit.errors import TrainkitError


class ConfigKeys:
    """Which keys and groups the configuration has, with some groups chosen.

    Args:
        words: the arguments that all trials share, with the places of configurations.
        maybe: values by key; those that choose an option of a group are chosen too.
    """

    def __init__(
        self, words: list[str], maybe: Mapping[str, Any] | None = None
    ) -> None:
        from omegaconf import OmegaConf

        from trainkit.cli.composition import Composition

        self._groups = Composition(words)
        chosen = [
            f"{key}={value}"
            for key, value in (maybe or {}).items()
            if isinstance(value, str) and value in self.options(key)
        ]
        config = Composition([*words, *chosen]).config
        self._config: Any = OmegaConf.to_container(config, resolve=False)

    def __call__(self, key: str) -> bool:
        """Whether an override of the key would be accepted."""
        return self._has(key) or bool(key and self.options(key))

    def options(self, key: str) -> list[str]:
        """The choices of a group; empty if the key is not a group."""
        return self._groups.options(key)

    def close_to(self, key: str) -> str | None:
        """The key that was probably meant, by its last part or by similar letters."""
        names = self._names(self._config)
        last = key.rpartition(".")[2]
        same_end = [name for name in names if name.rpartition(".")[2] == last]
        close = difflib.get_close_matches(key, names, n=1)
        return (same_end or close or [None])[0]

    def _has(self, key: str) -> bool:
        node: Any = self._config
        *parents, last = key.split(".")
        for parent in parents:
            node = node.get(parent) if isinstance(node, dict) else None
        return isinstance(node, dict) and last in node

    def _names(self, node: Mapping[Any, Any], prefix: str = "") -> list[str]:
        names = []
        for key, value in node.items():
            names.append(f"{prefix}{key}")
            if isinstance(value, dict):
                names += self._names(value, f"{prefix}{key}.")
        return names


def check_keys(sweep: SweepFile) -> None:
    """Refuse parameters that `trainkit train` does not have, and unknown choices.

    Other programs are not checked, since only they know their keys.

    Raises:
        TrainkitError: names the parameter and the key that was probably meant.
    """
    if not sweep.runs_trainkit:
        return
    from trainkit.cli.sweep.parameters import leaves

    every = dict(leaves(sweep.config["parameters"]))
    first = {name: _values(parameter)[0] for name, parameter in every.items()}
    keys = ConfigKeys(fixed_words(sweep.config), first)
    chosen = [name for name in every if keys.options(name)]
    for name in chosen:
        _check_choices(name, every[name], keys, sweep)
    for name in every:
        # If a group is swept too, its keys depend on the trial.
        if not keys(name) and name.partition(".")[0] not in chosen:
            close = keys.close_to(name)
            hint = f" Did you mean {close}?" if close else ""
            raise TrainkitError(
                f"{sweep.path} parameters.{name}: `trainkit train` has no such key."
                f"{hint} `trainkit train --cfg job` shows all."
            )


def _check_choices(
    name: str, parameter: Mapping[str, Any], keys: ConfigKeys, sweep: SweepFile
) -> None:
    for value in _values(parameter):
        if value not in keys.options(name):
            raise TrainkitError(
                f"{sweep.path} parameters.{name}: must be one of "
                f"{', '.join(sorted(keys.options(name)))}, received {value!r}."
            )


def _values(parameter: Mapping[str, Any]) -> list[Any]:
    return parameter.get("values", [parameter.get("value")])
