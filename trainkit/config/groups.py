"""The groups of the root configuration, and what may stand in each."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from trainkit.config.targets import TARGET, locate
from trainkit.errors import TrainkitError

CALLBACK_GROUPS = ("schedule", "lr_scaling", "batchnorm")
"""Groups that hold one callback each."""

_OF_FILES = ("model", "data", "trainer")
"""Groups of which every file makes an object."""

_ONE = (
    *_OF_FILES,
    *("accumulation", "micro_batching", *CALLBACK_GROUPS, "optimizer", "scheduler"),
)
_SEVERAL = ("callbacks", "logger")

_KINDS = {
    "model": "LightningModule",
    "trainer": "Trainer",
    **dict.fromkeys((*CALLBACK_GROUPS, "callbacks"), "Callback"),
    "logger": "loggers.Logger",
}

LIGHTNING = ("lightning.pytorch", "pytorch_lightning")
"""One library, in two packages."""


def nodes_of(config: DictConfig) -> Iterator[tuple[str, Any]]:
    """Each node that describes an object, with its key; empty ones are left out.

    Raises:
        TrainkitError: a node has no target.
    """
    for group in _ONE:
        node = config[group]
        if not is_empty(node) or group == "trainer":
            _refuse_without_target(node, group)
            yield group, node
    for group in _SEVERAL:
        if TARGET in (config[group] or {}):
            raise TrainkitError(
                f"{group}: must hold entries by name, received one without: {TARGET}: "
                f"{config[group][TARGET]}. Put it under a name of your choice: "
                f"{group}.mine.{TARGET}=..."
            )
        for key in entries_of(config, group):
            node = OmegaConf.select(config, key)
            if not (OmegaConf.is_dict(node) and TARGET in node):
                raise TrainkitError(
                    f"{key}: must have a {TARGET} or be null, received {node!r}. "
                    f"Write {key}.{TARGET}=my_module.MyClass."
                )
            yield key, node


def is_empty(node: Any) -> bool:
    """Whether nothing is chosen, as by `none`."""
    return not node or (OmegaConf.is_dict(node) and node.get(TARGET, True) is None)


def entries_of(config: DictConfig, group: str) -> list[str]:
    """The keys of a group's entries; an entry that is null is left out."""
    return [f"{group}.{name}" for name, node in (config[group] or {}).items() if node]


def _refuse_without_target(node: Any, group: str) -> None:
    """Refuse a file without a target, and an argument for `none`: `+group.size=4`."""
    names = list(map(str, node)) if OmegaConf.is_dict(node) else []
    if TARGET in names:
        return
    if group in _OF_FILES or not names:
        raise TrainkitError(
            f"{group}: must have a {TARGET}, received {', '.join(names) or node}. "
            f"Add a line {TARGET}: my_module.MyClass to the file that {group}=... "
            f"names."
        )
    without = " ".join(f"'~{group}.{name}'" for name in names)
    raise TrainkitError(
        f"{group}.{names[0]}: needs an option of {group}, and none is chosen, received "
        f"{node[names[0]]!r}. Choose one before it: {group}=...; trainkit train --help "
        f"lists the options. A file of your own needs a line {TARGET}: "
        f"my_module.MyClass. If an experiment sets the argument and you want no "
        f"{group}: {group}=none {without}"
    )


def check_kind(node: DictConfig, *, key: str) -> None:
    """Refuse a class that does not belong in its group.

    Any function may be named, since its result is not known before it is called.
    """
    kind = _KINDS.get(key.partition(".")[0])
    found = locate(node[TARGET], key=f"{key}.{TARGET}")
    if kind and inspect.isclass(found) and not issubclass(found, _bases(kind)):
        raise TrainkitError(
            f"{key}.{TARGET}: must be a subclass of lightning.pytorch.{kind}, or a "
            f"function that returns an object of one, received {node[TARGET]!r}. "
            f"Choose such a class, or the group to which this one belongs."
        )


def check_made(made: Any, target: str, *, key: str) -> None:
    """Refuse what a function of a configuration has returned, if it is of no use."""
    group = key.partition(".")[0]
    kind = _KINDS.get(group)
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
    modules = (".".join([package, *inner]) for package in LIGHTNING)
    return tuple(getattr(sys.modules[m], name) for m in modules if m in sys.modules)
