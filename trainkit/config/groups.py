"""The root configuration: its keys and types, its groups, and what may stand in each.

Hydra refuses a wrong key or type of the root by `TrainSchema`. The arguments of a
`_target_` are not listed there, the Trainer's neither: `trainkit.config.check` takes
their types from the signature of the target.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field, fields
from typing import Any, Optional

from omegaconf import MISSING, DictConfig, OmegaConf

from trainkit.config.targets import TARGET
from trainkit.errors import TrainkitError, did_you_mean

# OmegaConf 2.3 reads the old spelling of unions only.
# ruff: noqa: UP045


@dataclass
class PathsSchema:
    """The folders of a run."""

    root_dir: str = MISSING
    output_dir: str = MISSING
    run_dir: str = MISSING


@dataclass
class SchedulingSchema:
    """The interval of the scheduler, and its metric."""

    interval: str = "step"
    monitor: Optional[str] = None


@dataclass
class TrainSchema:
    """The root: an entry for each group, and entries that belong to no group."""

    accumulation: Any = None
    micro_batching: Any = None
    lr_scaling: Any = None
    batchnorm: Any = None
    schedule: Any = None
    model: Any = None
    data: Any = None
    optimizer: Any = None
    scheduler: Any = None
    trainer: Any = None
    logger: Any = None
    callbacks: Any = None
    paths: PathsSchema = field(default_factory=PathsSchema)
    scheduling: SchedulingSchema = field(default_factory=SchedulingSchema)
    name: str = MISSING
    seed: Optional[int] = None
    wide_gradients: bool = False
    tags: Optional[list[str]] = None
    checks: str = "late"
    proof: str = "warn"
    ckpt_path: Optional[str] = None
    metric: Optional[str] = None
    mode: str = "min"
    test: bool = False
    report: bool = True
    pictures: bool = True


_READ = {field.name for field in fields(TrainSchema)} | {"hydra"}

CALLBACK_GROUPS = ("schedule", "lr_scaling", "batchnorm")
"""Groups that hold one callback each."""

_ONE = ("model", "data", "trainer", "accumulation", "micro_batching")
_ONE += (*CALLBACK_GROUPS, "optimizer", "scheduler")
_SEVERAL = ("callbacks", "logger")

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
            _refuse_without_target(node, key)
            yield key, node


def _refuse_without_target(node: Any, key: str) -> None:
    """Refuse a file without a target, and an argument for `none`: `+group.size=4`."""
    names = list(map(str, node)) if OmegaConf.is_dict(node) else []
    if TARGET not in names:
        received = ", ".join(names) or repr(node)
        choose = f"Choose an option before it, {key}=..., or add" * ("." not in key)
        without = " ".join(f"'~{key}.{name}'" for name in names)
        raise TrainkitError(
            f"{key}: must have a {TARGET} or be null, received {received}. "
            f"{choose or 'Add'} a line {TARGET}: my_module.MyClass to a file of your "
            f"own{', or take it out: ' * bool(names)}{without}"
        )


def is_empty(node: Any) -> bool:
    """Whether nothing is chosen, as by `none`."""
    return not node or (OmegaConf.is_dict(node) and node.get(TARGET, True) is None)


def entries_of(config: DictConfig, group: str) -> list[str]:
    """The keys of a group's entries; an entry that is null is left out."""
    return [f"{group}.{name}" for name, node in (config[group] or {}).items() if node]


def refuse_unread(config: DictConfig) -> None:
    """Refuse a root key that trainkit does not have, and that no other value uses.

    A key of one's own, for values that are used in several places, is read by
    interpolation: `${size}`.
    """
    text = OmegaConf.to_yaml(config, resolve=False)
    for name in map(str, config):
        used = re.search(rf"\$\{{([^}}]*[^\w}}])?{re.escape(name)}\b", text)
        if name not in _READ and not used:
            raise TrainkitError(
                f"{name}: nothing reads this key, so it would have no effect, received "
                f"{name}={config[name]!r}.{meant_by(name, config)} A key of "
                f"your own must be used by another value, as ${{{name}}}."
            )


def meant_by(name: str, config: MutableMapping[Any, Any], *, group: str = "") -> str:
    """A sentence with the keys of groups that have a name, or else with a close one.

    >>> meant_by("lr", {"optimizer": {"lr": 1}, "seed": 0})
    ' Did you mean optimizer.lr?'
    >>> meant_by("max_epoch", {"max_epochs": 3}, group="trainer")
    ' Did you mean trainer.max_epochs?'

    Args:
        name: that is not there.
        config: where it was looked for.
        group: the path of that in the whole configuration.
    """
    before = f"{group}." if group else ""
    places = []
    for key in config:
        try:
            inner = config[key]
        except Exception:  # it is to be given, or uses what does not exist
            continue
        if isinstance(inner, MutableMapping) and name in inner:
            places.append(f"{before}{key}.{name}")
    if places:
        return f" Did you mean {' or '.join(places[:3])}?"
    keys = [f"{before}{key}" for key in config if key != name]
    return did_you_mean(f"{before}{name}", keys)
