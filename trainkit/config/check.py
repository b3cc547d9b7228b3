"""Refuses wrong keys and types before anything is built.

The types come from the signature of the target, in trainkit's code or in yours.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf

from trainkit.config.fitting import fits, remedy_for_text
from trainkit.config.kinds import CALLBACK_GROUPS, check_kinds
from trainkit.config.limits import check_limits
from trainkit.config.schema import TrainSchema
from trainkit.config.targets import TARGET, locate, targets_of
from trainkit.config.translate import OF_HYDRA
from trainkit.config.unread_keys import refuse_unread
from trainkit.errors import TrainkitError, did_you_mean

AUTO = "auto"
"""The value of a scheduler's argument that stands for the number of all steps."""

_PARTIAL = ("optimizer", "scheduler")
"""Groups whose first argument exists only when the training begins."""


def refuse_other_root(config: DictConfig) -> None:
    """Refuse a root configuration that is not built on trainkit's own."""
    missing = [field.name for field in fields(TrainSchema) if field.name not in config]
    if missing:
        raise TrainkitError(
            f"configuration: must have what trainkit's train.yaml has, received one "
            f"without {', '.join(missing[:3])}. Give your file another name, and begin "
            f"its defaults with - train."
        )


def check_all(config: DictConfig) -> None:
    """Refuse arguments that do not fit the signatures of their targets."""
    if not config.model or not config.model.get(TARGET, True):
        raise TrainkitError(
            "model: must be given. Choose model=..., one of trainkit's or of your "
            "conf/model, or write model._target_=my_module.MyModule."
        )
    refuse_unread(config)
    check_kinds(config)
    for name in ("model", "data", "trainer"):
        _refuse_without_class(config[name], name)
    groups = ("accumulation", "micro_batching", *CALLBACK_GROUPS, "optimizer")
    for name in ("model", "data", *groups, "trainer"):
        check(config[name], key=name)
    check(_with_some_steps(config.scheduler), key="scheduler")
    for group in (*groups, "scheduler"):
        _refuse_without_option(config[group], group)
    for group in ("callbacks", "logger"):
        check(config[group], key=group)
        _refuse_without_target(config[group], key=group)
    check_limits(config)


def _refuse_without_option(node: DictConfig | None, group: str) -> None:
    """Refuse an argument in a group without a target: `+group.size=4`, or one that an
    experiment sets although the user wrote `group=none`."""
    if OmegaConf.is_dict(node) and node and TARGET not in node:
        name = next(iter(node))
        without = " ".join(f"'~{group}.{name}'" for name in node)
        raise TrainkitError(
            f"{group}.{name}: needs an option of {group}, and none is chosen, received "
            f"{node[name]!r}. Choose one before it: {group}=...; trainkit train --help "
            f"lists the options. A file of your own needs a line {TARGET}: "
            f"my_module.MyClass. If an experiment sets the argument and you want no "
            f"{group}: {group}=none {without}"
        )


def _refuse_without_class(node: DictConfig | None, group: str) -> None:
    """Refuse a group's file without a target; only the data may be left out."""
    if (node or group != "data") and TARGET not in (node or {}):
        names = ", ".join(map(str, node or ())) or "nothing"
        raise TrainkitError(
            f"{group}: must have a {TARGET}, received {names}. Add a line {TARGET}: "
            f"my_module.MyClass to the file that {group}=... names."
        )


def _refuse_without_target(group: DictConfig | None, *, key: str) -> None:
    """Refuse an entry without a target in a group that holds several by name."""
    if not group:
        return
    if TARGET in group:
        raise TrainkitError(
            f"{key}: must hold entries by name, received one without: {TARGET}: "
            f"{group[TARGET]}. Put it under a name of your choice: "
            f"{key}.mine.{TARGET}=..."
        )
    for name in group:
        node = group[name]
        if node and not (OmegaConf.is_dict(node) and TARGET in node):
            raise TrainkitError(
                f"{key}.{name}: must have a {TARGET} or be null, received {node!r}. "
                f"Write {key}.{name}.{TARGET}=my_module.MyClass."
            )


def _with_some_steps(node: DictConfig | None) -> DictConfig | None:
    """A scheduler with a number in place of `auto`, whose value is not known yet."""
    if not node:
        return None
    known = node.copy()
    for name in node:
        if node[name] == AUTO:
            known[name] = 1
    return known


def check(config: Any, *, key: str) -> None:
    """Compare a node and the nodes inside it with the signatures of their targets.

    Args:
        config: a node of the configuration, or None.
        key: its dotted name, for the message.

    Raises:
        TrainkitError: an unknown key, a missing one, or a value of the wrong type.
    """
    if not OmegaConf.is_config(config):
        return
    is_list = OmegaConf.is_list(config)
    for name in range(len(config)) if is_list else config:
        inner = f"{key}[{name}]" if is_list else f"{key}.{name}"
        if OmegaConf.is_missing(config, name):
            hints = {} if is_list else _hints(locate(config.get(TARGET), key=key))
            word = _word(inner, hints.get(str(name)))
            raise TrainkitError(
                f"{inner}: must be given. Add {word} to the command line."
            )
        check(config[name], key=inner)
    if not is_list and TARGET in config:
        target = locate(config[TARGET], key=f"{key}.{TARGET}")
        _check_arguments(target, config, key)


def _check_arguments(target: Any, config: DictConfig, key: str) -> None:
    """Compare one node with the signature of its target."""
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):
        return  # written in C: it refuses wrong arguments itself
    values = {str(name): config[name] for name in config if str(name) not in OF_HYDRA}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if not takes_any:
        for name in values:
            _refuse_unknown(name, [*parameters], key, target)
    if "_args_" not in config and not config.get("_partial_", False):
        for name, parameter in parameters.items():
            _refuse_missing(name, parameter, set(values), key, target)
    hints = _hints(target)
    for name, value in values.items():
        is_default = (
            value is None and name in parameters and (parameters[name].default is None)
        )
        if name in hints and not is_default:
            _refuse_wrong_type(value, hints[name], f"{key}.{name}")


def _refuse_unknown(name: str, known: list[str], key: str, target: Any) -> None:
    if name in known:
        return
    raise TrainkitError(
        f"{key}.{name}: {target.__qualname__} has no such argument."
        f"{did_you_mean(name, known)} It takes: {', '.join(known) or 'none'}."
    )


def _refuse_missing(
    name: str, parameter: inspect.Parameter, present: set[str], key: str, target: Any
) -> None:
    is_variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    if is_variadic or parameter.default is not parameter.empty or name in present:
        return
    if key in _PARTIAL:
        raise TrainkitError(
            f"{key}: {target.__qualname__} needs {name}, which exists only when the "
            f"training begins. Add _partial_: true beside its {TARGET}."
        )
    raise TrainkitError(
        f"{key}.{name}: {target.__qualname__} needs it. Add {key}.{name}=... to the "
        f"command line."
    )


def _refuse_wrong_type(value: Any, hint: Any, key: str) -> None:
    if OmegaConf.is_config(value):
        if any(True for _ in targets_of(value)):
            return  # an object that is not made yet
        value = OmegaConf.to_container(value, resolve=True)
    if not fits(value, hint):
        advice = remedy_for_text(value, hint)
        if _is_mapping(hint):
            advice = f"On the command line: {_word(key, hint)}"
        raise TrainkitError(
            f"{key}: must be {_name_of(hint)}, received {value!r}. {advice}".rstrip()
        )


def _is_mapping(hint: Any) -> bool:
    return get_origin(hint) is Mapping and get_args(hint) == (int, int)


def _word(key: str, hint: Any) -> str:
    """A word that sets a key; a shell would take braces without quotes apart."""
    return f"'{key}={{0: 2, 5: 4}}'" if _is_mapping(hint) else f"{key}=..."


def _hints(target: Any) -> Mapping[str, Any]:
    function = target.__init__ if inspect.isclass(target) else target
    try:
        return get_type_hints(function)
    except Exception:  # a hint names something that only a type checker imports
        return {}


def _name_of(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
