"""Keys of the root that nothing reads, and the keys that they may be meant for."""

from __future__ import annotations

import re
from collections.abc import MutableMapping
from dataclasses import fields
from typing import Any

from omegaconf import DictConfig, OmegaConf

from trainkit.config.schema import TrainSchema
from trainkit.errors import TrainkitError, did_you_mean

_READ = {field.name for field in fields(TrainSchema)} | {"hydra"}


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
