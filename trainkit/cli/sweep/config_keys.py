"""A check of a sweep's parameters against the keys of `trainkit train`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from trainkit.cli.sweep.command import fixed_words
from trainkit.cli.sweep.parameters import leaves
from trainkit.cli.sweep.sweep_file import SweepFile
from trainkit.errors import TrainkitError


class ConfigKeys:
    """The keys and groups of the configuration that trials share.

    Args:
        words: the arguments of all trials, with the places of configurations.
        maybe: values by key. A value that is an option of a group is chosen too.
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
        self._names = _names(OmegaConf.to_container(config, resolve=False))

    def __call__(self, key: str) -> bool:
        """Whether an override of the key would be accepted."""
        return key in self._names or bool(key and self.options(key))

    def options(self, key: str) -> list[str]:
        """The choices of a group; empty if the key is not a group."""
        return self._groups.options(key)

    def close_to(self, key: str) -> str | None:
        """The key that was probably meant, by its last part or by similar letters."""
        last = key.rpartition(".")[2]
        with_its_end = [n for n in self._names if n.rpartition(".")[2] == last]
        close = difflib.get_close_matches(key, self._names, n=1)
        return next(iter(with_its_end or close), None)


def _names(node: Any, prefix: str = "") -> list[str]:
    """The dotted names of all sections and values."""
    names = []
    for key, value in node.items():
        names.append(f"{prefix}{key}")
        if isinstance(value, dict):
            names += _names(value, f"{prefix}{key}.")
    return names


def check_keys(sweep: SweepFile) -> None:
    """Refuse parameters that `trainkit train` does not have, and unknown choices.

    Other programs are not checked, since only they know their keys.
    """
    if not sweep.runs_trainkit:
        return
    every = dict(leaves(sweep.config["parameters"]))
    first = {name: _values(parameter)[0] for name, parameter in every.items()}
    keys = ConfigKeys(fixed_words(sweep.config), first)
    chosen = [name for name in every if keys.options(name)]
    for name in chosen:
        for value in _values(every[name]):
            if value not in keys.options(name):
                raise TrainkitError(
                    f"{sweep.path} parameters.{name}: must be one of "
                    f"{', '.join(sorted(keys.options(name)))}, received {value!r}."
                )
    for name in every:
        # If a group is swept too, its keys depend on the trial.
        if not keys(name) and name.partition(".")[0] not in chosen:
            close = keys.close_to(name)
            hint = f" Did you mean {close}?" if close else ""
            raise TrainkitError(
                f"{sweep.path} parameters.{name}: `trainkit train` has no such key."
                f"{hint} `trainkit train --cfg job` shows all."
            )


def _values(parameter: Mapping[str, Any]) -> list[Any]:
    return parameter.get("values", [parameter.get("value")])
