"""Refuses a class that does not belong in its group."""

from __future__ import annotations

import inspect
import sys
from typing import Any

from omegaconf import DictConfig, OmegaConf

from trainkit.config.targets import TARGET, locate
from trainkit.errors import TrainkitError

CALLBACK_GROUPS = ("schedule", "lr_scaling", "batchnorm")
"""Groups that hold one callback each."""

_LIGHTNING = ("lightning.pytorch", "pytorch_lightning")  # one library, two packages

_ONE = {
    "model": "LightningModule",
    "trainer": "Trainer",
    **dict.fromkeys(CALLBACK_GROUPS, "Callback"),
}
_SEVERAL = {"callbacks": "Callback", "logger": "loggers.Logger"}


def check_kinds(config: DictConfig) -> None:
    """Refuse a class that is not a subclass of its group's kind.

    Any function may be named, since its result is not known before it is called.
    """
    for group, kind in _ONE.items():
        _refuse_other_kind(config[group], kind, key=group)
    for group, kind in _SEVERAL.items():
        if OmegaConf.is_dict(config[group]):
            for name, node in config[group].items():
                _refuse_other_kind(node, kind, key=f"{group}.{name}")


def _refuse_other_kind(node: Any, kind: str, *, key: str) -> None:
    if not (OmegaConf.is_dict(node) and TARGET in node):
        return
    found = locate(node[TARGET], key=f"{key}.{TARGET}")
    if inspect.isclass(found) and not issubclass(found, _bases(kind)):
        raise TrainkitError(
            f"{key}.{TARGET}: must be a subclass of lightning.pytorch.{kind}, or a "
            f"function that returns an object of one, received {node[TARGET]!r}. "
            f"Choose such a class, or the group to which this one belongs."
        )


def check_made(made: Any, target: str, *, key: str) -> None:
    """Refuse what a function of a configuration has returned, if it is of no use."""
    group = key.partition(".")[0]
    kind = _ONE.get(group) or _SEVERAL.get(group)
    if group == "data" and not hasattr(made, "__iter__"):  # which loaders have
        kind = "LightningDataModule"
    if kind is not None and not isinstance(made, _bases(kind)):
        raise TrainkitError(
            f"{key}.{TARGET}: must return an object of lightning.pytorch.{kind}, and "
            f"{target} has returned {type(made).__name__}. Return one, or name a class."
        )


def _bases(kind: str) -> tuple[type, ...]:
    """The kind's class in each package of Lightning that has been imported."""
    *inner, name = kind.split(".")
    modules = (".".join([package, *inner]) for package in _LIGHTNING)
    return tuple(getattr(sys.modules[m], name) for m in modules if m in sys.modules)
