"""Refuses wrong keys, types and numbers before anything is built.

The types come from the signature of the target, in trainkit's code or in yours.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, get_args, get_type_hints

from omegaconf import DictConfig, OmegaConf
from pydantic import ConfigDict, TypeAdapter, ValidationError

from trainkit.config.groups import (
    TrainSchema,
    is_empty,
    nodes_of,
    refuse_unread,
)
from trainkit.config.targets import TARGET, locate, nodes_with_target
from trainkit.core.checks import Checks
from trainkit.errors import TrainkitError, did_you_mean

AUTO = "auto"
"""The value of a scheduler's argument that stands for the number of all steps."""

_OF_TEXTS = (
    "The text is not converted. Write it without quotes, or put ${oc.decode:...} "
    "around its source. An object, class or function is named by _target_; the last "
    "two with _partial_: true."
)

_OF_HYDRA = (TARGET, "_partial_", "_recursive_", "_convert_", "_args_")
"""What Hydra reads in a node, beside the arguments of its target."""

_PARTIAL = ("optimizer", "scheduler")
"""Groups whose first argument exists only when the training begins."""

_NO_VALIDATION = "trainer.limit_val_batches=0 leaves validation out."

_LIMITS = {
    "trainer.accumulate_grad_batches": (1, "at least 1", "1 accumulates nothing."),
    "trainer.check_val_every_n_epoch": (1, "at least 1", _NO_VALIDATION),
    "trainer.val_check_interval": (math.ulp(0.0), "above 0", _NO_VALIDATION),
    "trainer.log_every_n_steps": (0, "at least 0", "0 logs no step."),
    "trainer.gradient_clip_val": (0, "at least 0", "null and 0 clip nothing."),
    "seed": (0, "from 0 to 4294967295", "null leaves the generators alone."),
    "mode": (("min", "max"), "min or max", "max is for a metric that should grow."),
    "checks": (get_args(Checks), "late or now", "now stops before a bad loss's step."),
}
"""The least number, or the choices, of some keys; the rule in words; and a remedy."""

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_STRICT = ConfigDict(strict=True, arbitrary_types_allowed=True)


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
    if is_empty(config.model):
        raise TrainkitError(
            "model: must be given. Choose model=..., one of trainkit's or of your "
            "conf/model, or write model._target_=my_module.MyModule."
        )
    refuse_unread(config)
    for key, node in list(nodes_of(config)):  # all must have a target first
        check(node, key=key)
    check_limits(config)


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
    for name in sorted(OmegaConf.missing_keys(config)):  # from the root, if it has one
        name = f"{key}.{name.removeprefix(f'{key}.')}"
        raise TrainkitError(
            f"{name}: must be given. Add {name}=... to the command line."
        )
    for inner, node in nodes_with_target(config, key):
        _check_arguments(locate(node[TARGET], key=f"{inner}.{TARGET}"), node, inner)


def _check_arguments(target: Any, node: Mapping[Any, Any], key: str) -> None:
    """Compare one node with the signature of its target."""
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):
        return  # written in C: it refuses wrong arguments itself
    values = {str(name): node[name] for name in node if str(name) not in _OF_HYDRA}
    known = {each.name: each for each in parameters if each.kind not in _VARIADIC}
    unknown = [name for name in values if name not in known]
    if unknown and all(each.kind != each.VAR_KEYWORD for each in parameters):
        raise TrainkitError(
            f"{key}.{unknown[0]}: {target.__qualname__} has no such argument."
            f"{did_you_mean(unknown[0], known)} It takes: "
            f"{', '.join(known) or 'none'}."
        )
    needed = [name for name, each in known.items() if each.default is each.empty]
    lacking = [name for name in needed if name not in values]
    if lacking and "_args_" not in node and not node.get("_partial_", False):
        name = lacking[0]
        if key in _PARTIAL:
            raise TrainkitError(
                f"{key}: {target.__qualname__} needs {name}, which exists only when "
                f"the training begins. Add _partial_: true beside its {TARGET}."
            )
        raise TrainkitError(
            f"{key}.{name}: {target.__qualname__} needs it. Add {key}.{name}=... to "
            f"the command line."
        )
    hints = _hints(target)
    for name, value in values.items():
        is_default = name in known and known[name].default is value is None
        is_later = key == "scheduler" and value == AUTO
        if name in hints and not is_default and not is_later:
            _refuse_wrong_type(value, hints[name], f"{key}.{name}")


def _refuse_wrong_type(value: Any, hint: Any, key: str) -> None:
    is_made_later = any(True for _ in nodes_with_target(value))
    if not is_made_later and not fits(value, hint):
        advice = "" if isinstance(value, int | float | None) else _OF_TEXTS
        name = hint.__name__ if isinstance(hint, type) else str(hint)
        raise TrainkitError(
            f"{key}: must be {name.replace('typing.', '')}, received {value!r}. "
            f"{advice}".rstrip()
        )


def _hints(target: Any) -> Mapping[str, Any]:
    function = target.__init__ if inspect.isclass(target) else target
    try:
        return get_type_hints(function)
    except Exception:  # a hint names something that only a type checker imports
        return {}


def check_limits(config: DictConfig) -> None:
    """Refuse numbers out of range, and unknown choices."""
    noise_scale = OmegaConf.select(config, "lr_scaling.noise_scale")
    if isinstance(noise_scale, str):
        raise TrainkitError(
            f"lr_scaling.noise_scale: must be a number of samples, so that a run that "
            f"is resumed has the same one, received {noise_scale!r}. The last lines of "
            f"a run say its number, and summary.json has it."
        )
    for key, (limit, rule, remedy) in _LIMITS.items():
        value = OmegaConf.select(config, key)
        if isinstance(limit, tuple):
            is_wrong = value not in limit
        else:
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            most = 2**32 - 1 if key == "seed" else math.inf
            is_wrong = is_number and not limit <= value <= most
        if is_wrong:
            raise TrainkitError(f"{key}: must be {rule}, received {value!r}. {remedy}")


def refuse_no_end(trainer: DictConfig) -> None:
    """Refuse a training for which nothing says when it ends."""
    ends = [trainer.get(key) for key in ("max_epochs", "max_time", "fast_dev_run")]
    if any(end is not None and end is not False for end in ends):
        return
    if trainer.get("max_steps", -1) == -1:
        raise TrainkitError(
            "trainer.max_epochs: a training needs an end, and none is given. Add "
            "trainer.max_epochs=10, or trainer.max_steps=1000."
        )


def fits(value: Any, hint: Any) -> bool:
    """Whether a value has a type, without any conversion.

    A list may stand for a tuple or a set, and a text for a path, as YAML has neither.

    Args:
        value: a plain value, without nodes of a configuration.
        hint: a type. A value fits if its type cannot be checked.

    >>> fits(8, int), fits("8", int), fits("8", int | str)
    (True, False, True)
    >>> fits([1, 2], tuple[int, int]), fits([1, "2"], list[int])
    (True, False)
    """
    try:
        adapter = _adapter(hint)
    except Exception:  # of pydantic, which knows no such type, or of the type's module
        return True
    try:
        adapter.validate_python(value)
    except ValidationError:
        return _fits_as_json(value, adapter)
    except TypeError:  # of a validator of the type's own
        return True
    return True


def _adapter(hint: Any) -> TypeAdapter[Any]:
    try:
        return TypeAdapter(hint, config=_STRICT)
    except Exception:  # a dataclass or a model has a configuration of its own
        return TypeAdapter(hint)


def _fits_as_json(value: Any, adapter: TypeAdapter[Any]) -> bool:
    try:
        adapter.validate_json(json.dumps(value), strict=True)
    except (TypeError, ValueError):  # of either; a ValidationError is a ValueError
        return False
    return True
