"""The resolved configuration in a form that may be written down and shown."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainkit.config.redact import redact

_ENVIRONMENT = re.compile(r"\$\{\s*(oc\s*\.\s*(env\s*:|\$\{)|hydra\s*:\s*job\.env_set)")
"""An interpolation that reads the environment, or may: `${oc.${name}:HOME}` too."""
_OPENING = re.compile(r"(\\*)\$\{")
_CALL = re.compile(r"(?<!\\)\$\{[\w.]+:")


def public_config(config: DictConfig | Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with interpolations resolved, without the environment's values.

    An interpolation of an environment variable stays as it was written, also if another
    entry leads to it. The file then names the source of the value, and a copy of it
    works elsewhere. An interpolation that cannot be resolved stays too. Secrets are
    replaced, see `trainkit.config.redact`.

    >>> public_config({"a": "${oc.env:HOME}", "b": "${a}/x", "n": "${m}", "m": 2})
    {'a': '${oc.env:HOME}', 'b': '${oc.env:HOME}/x', 'n': 2, 'm': 2}

    Args:
        config: the whole configuration, since interpolations may lead anywhere in it.
    """
    whole: Any = OmegaConf.create(config)  # type: ignore[arg-type]
    raw = OmegaConf.to_container(whole, resolve=False, enum_to_str=True)
    resolved = OmegaConf.create(_as_text(raw))
    return redact(_plain(resolved))


def _as_text(value: Any) -> Any:
    """A value with each `${oc.env:...}` escaped, so that OmegaConf reads a text."""
    if isinstance(value, dict):
        return {key: _as_text(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_as_text(each) for each in value]
    if isinstance(value, PurePath):
        return str(value)
    if _reads_environment(value):
        # A backslash before it must be escaped too.
        return _OPENING.sub(lambda found: 2 * found[1] + "\\${", value)
    return value


def _reads_environment(value: Any) -> bool:
    return isinstance(value, str) and _ENVIRONMENT.search(value) is not None


def _plain(node: Any) -> Any:
    if not OmegaConf.is_config(node):
        return node
    written: Any = OmegaConf.to_container(node, resolve=False)
    if OmegaConf.is_dict(node):
        return {key: _value(node, key, written[key]) for key in node}
    return [_value(node, index, each) for index, each in enumerate(written)]


def _value(node: Any, key: Any, written: Any) -> Any:
    if OmegaConf.is_missing(node, key):
        return written
    try:
        value = _plain(node[key])
    except (OmegaConfBaseException, ValueError, TypeError):
        return written
    # A resolver that computes with an environment variable received only its name.
    is_computed = isinstance(written, str) and _CALL.search(written)
    return written if is_computed and _reads_environment(value) else value
