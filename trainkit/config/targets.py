"""Makes objects from configurations, of allowed packages only."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Iterator, Mapping
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hydra.utils
from hydra.errors import HydraException
from omegaconf import OmegaConf

from trainkit.errors import TrainkitError

TARGET = "_target_"
VARIABLE = "TRAINKIT_ALLOW"

_PARTS = (
    "trainkit.core",
    "trainkit.data",
    "trainkit.lit",
    "trainkit.recipes",
    "trainkit.cli.wandb_logger",
    "torch.nn",
    "torch.optim",
    "torch.utils.data",
    "torchmetrics",
    "lightning.pytorch",
    "lightning.fabric",
    "pytorch_lightning",
    "lightning_fabric",
)
"""Packages that are always allowed; the rest of torch can run programs, for example."""

INSTALLED = {"site-packages", "dist-packages"}

_allowed: set[str] = set()


def allow_targets(*packages: str) -> None:
    """Allow targets of these packages, or parts of packages, in this process.

    >>> allow_targets("my_project", "torch.distributions")
    """
    _allowed.update(packages)


def allowed() -> list[str]:
    """The packages, or parts of them, whose classes a configuration may name.

    Some are always allowed. `allow_targets` and the environment variable
    `TRAINKIT_ALLOW`, separated by commas, add others.
    """
    named = os.environ.get(VARIABLE, "").split(",")
    return [*_PARTS, *sorted(_allowed | {each.strip() for each in named} - {""})]


def instantiate(config: Any, *args: Any, **kwargs: Any) -> Any:
    """`hydra.utils.instantiate`, for targets of allowed packages.

    A stranger's configuration file could contain `_target_: os.system`. Both the name
    of a target and the module that defines the object must therefore be allowed, so
    that `torch.os.system` is refused. This is not a sandbox: an allowed target may read
    and write files.

    Args:
        config: a node with a `_target_`, here or deeper; Hydra returns other values
            unchanged.
        args: arguments for the target.
        kwargs: arguments for the target, in place of the configuration's.

    Raises:
        TrainkitError: a target is not allowed, or does not exist.
    """
    for each in (config, kwargs):
        for key, node in nodes_with_target(each):
            locate(node[TARGET], key=f"{key}.{TARGET}".lstrip("."))
    return hydra.utils.instantiate(config, *args, **kwargs)


def locate(target: Any, *, key: str = TARGET) -> Any:
    """The object that a target names, if it is allowed.

    Args:
        target: a dotted path, or the object itself.
        key: its key in the configuration, for the message.
    """
    if not isinstance(target, str):
        return target  # a program has put it there
    package = target.partition(".")[0]
    spec = _spec(package)
    is_here = _is_here(spec)
    if not is_here and package not in {part.partition(".")[0] for part in allowed()}:
        if spec is None:
            raise TrainkitError(
                f"{key}: must name something that can be imported, received "
                f"{target!r}, and there is no module {package!r}, neither installed "
                f"nor in the current folder ({Path.cwd()})."
            )
        raise _not_allowed(target, key, package)
    found = _imported(target, key)
    home = found.__name__ if inspect.ismodule(found) else _home_of(found)
    parts = allowed()
    if is_here and _is_here(_spec(home.partition(".")[0])):
        parts.append(home)
    if not any(f"{home}.".startswith(f"{part}.") for part in parts):
        raise _not_allowed(target, key, home)
    return found


def _imported(target: str, key: str) -> Any:
    log = logging.getLogger("hydra.utils")
    try:
        log.disabled = True  # it would say what is said below
        return hydra.utils.get_object(target)
    except (HydraException, ImportError, AttributeError, ValueError) as error:
        cause = error.__cause__ or error
        reason = str(cause).strip().splitlines()[0]
        if isinstance(cause, TrainkitError):  # its text already says what to do
            raise TrainkitError(f"{key}: {reason}") from error
        missing = (getattr(cause, "name", None) or "trainkit").partition(".")[0]
        if target.startswith("trainkit.recipes.") and missing != "trainkit":
            raise TrainkitError(
                f"{key}: {target} needs a package that is not installed: {reason}. "
                f"pip install 'lightning-trainkit[recipes]'"
            ) from error
        raise TrainkitError(
            f"{key}: there is no {target!r}: {reason}. Give the dotted path of a class "
            f"or function that can be imported."
        ) from error
    finally:
        log.disabled = False


def _spec(package: str) -> ModuleSpec | None:
    try:
        return find_spec(package)
    except (ImportError, ValueError):
        return None


def _is_here(spec: ModuleSpec | None) -> bool:
    """Whether a module lies in the current folder, and is not installed there."""
    if spec is None or spec.name == "trainkit":
        return False
    origin = [spec.origin] if spec.origin and spec.has_location else []
    here = Path.cwd()
    for place in origin or spec.submodule_search_locations or []:
        path = Path(place).absolute()
        if path.is_relative_to(here):
            return not INSTALLED & {*path.relative_to(here).parts}
    return False


def _home_of(found: Any) -> str:
    """The module that defines an object; for a method, the one of its class."""
    home = getattr(found, "__module__", None)
    if isinstance(home, str):
        return home
    return type(getattr(found, "__self__", found)).__module__


def nodes_with_target(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """The mappings in a configuration that have a target, each with its key."""
    if OmegaConf.is_config(node):
        node = OmegaConf.to_container(node, resolve=True)
    if isinstance(node, Mapping):
        if TARGET in node:
            yield key, node
        for name, each in node.items():
            yield from nodes_with_target(each, f"{key}.{name}" if key else str(name))
    elif isinstance(node, list | tuple):
        for index, each in enumerate(node):
            yield from nodes_with_target(each, f"{key}[{index}]")


def _not_allowed(target: str, key: str, home: str) -> TrainkitError:
    return TrainkitError(
        f"{key}: must name something of an allowed package, received {target!r}, which "
        f"is of {home!r}. Allowed: {', '.join(allowed())}. To allow it, set "
        f"{VARIABLE}={home} in the environment, or call "
        f"trainkit.config.allow_targets({home!r})."
    )
