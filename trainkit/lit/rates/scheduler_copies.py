"""Copies of schedulers that can be run without effect on the training."""

from __future__ import annotations

import copy
from dataclasses import is_dataclass
from functools import partial
from types import CellType, FunctionType, ModuleType
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from trainkit.errors import TrainkitError

_KNOWN = ("torch.optim.", "trainkit.")
"""The packages whose schedulers compute rates and do nothing else."""
_CONSTANT = (int, float, str, type(None), type, ModuleType)


def copy_schedulers(trainer: Any) -> tuple[Any, list[tuple[str, Any]]]:
    """Copies of the first optimizer and of each scheduler, with its interval.

    Weights and moments are not copied. Functions are, with the variables that they use:
    a copied function that counts its calls has its own count. (A second call of
    `configure_optimizers` would make new objects too. But it may register hooks, count
    calls, or communicate between ranks, and so change the training.)

    Raises:
        TrainkitError: a copy would share a user's object that may remember calls.
    """
    optimizer = trainer.optimizers[0]
    configs = trainer.lr_scheduler_configs
    for config in configs:
        _refuse_unsafe(config.scheduler)
    shared = [p for group in optimizer.param_groups for p in group["params"]]
    memo: dict[int, Any] = {id(parameter): parameter for parameter in shared}
    memo[id(optimizer.state)] = {}
    schedulers = [(each.interval, each.scheduler) for each in configs]
    copied = copy.deepcopy((optimizer, schedulers), memo)
    known: dict[int, Any] = {}
    for _, scheduler in copied[1]:
        _copy_functions(scheduler, known)
    return copied


def _refuse_unsafe(scheduler: Any) -> None:
    """Refuse a scheduler whose copy might share state with the training."""
    kind = type(scheduler)
    if not isinstance(scheduler, LRScheduler) or not kind.__module__.startswith(_KNOWN):
        raise TrainkitError(f"{kind.__name__} is not one of torch's schedulers")
    for name, value in vars(scheduler).items():
        for each in value if isinstance(value, list | tuple) else [value]:
            if isinstance(each, LRScheduler):  # of a SequentialLR, say
                _refuse_unsafe(each)
            elif callable(each) and not _is_stateless(each):
                raise TrainkitError(
                    f"{name} of {kind.__name__} may remember its calls, or read what "
                    f"only the training has"
                )


def _is_stateless(value: Any) -> bool:
    """Whether a value is a constant, or a function that uses constants only.

    >>> def falling(factor):
    ...     return lambda step: factor / step
    >>> _is_stateless(falling(2.0)), _is_stateless(falling([2.0]))
    (True, False)
    """
    if isinstance(value, _CONSTANT):
        return True
    if isinstance(value, partial):
        held = (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        held = (*cells, *defaults)
    elif isinstance(value, tuple):
        held = value
    elif is_dataclass(value):
        held = tuple(vars(value).values())
    else:
        return False
    return all(map(_is_stateless, held))


def _copy_functions(value: Any, known: dict[int, Any]) -> Any:
    """Copy the functions inside a copied value, which `copy.deepcopy` shares.

    Args:
        value: a scheduler is changed in place; other values are copied.
        known: the copies made so far, by the identity of the original.
    """
    own = partial(_copy_functions, known=known)
    if isinstance(value, LRScheduler):
        held = vars(value)
        held.update({name: own(each) for name, each in held.items()})
    elif type(value) in (list, tuple):
        return type(value)(map(own, value))
    elif isinstance(value, partial):
        named = {name: own(each) for name, each in value.keywords.items()}
        return partial(own(value.func), *map(own, value.args), **named)
    elif isinstance(value, FunctionType):
        return known.get(id(value)) or _copy_function(value, known)
    return value


def _copy_function(function: FunctionType, known: dict[int, Any]) -> FunctionType:
    """A copy with its own global, enclosing and default variables."""
    scope = known.setdefault(id(function.__globals__), dict(function.__globals__))
    cells = function.__closure__ or ()
    own = tuple(known.setdefault(id(cell), CellType()) for cell in cells)
    made = FunctionType(function.__code__, scope, function.__name__, None, own)
    known[id(function)] = made
    made.__defaults__ = _copy_functions(function.__defaults__, known)
    named = function.__kwdefaults__ or {}
    made.__kwdefaults__ = {k: _copy_functions(v, known) for k, v in named.items()}
    for cell, copied in zip(cells, own, strict=True):
        copied.cell_contents = _copy_functions(cell.cell_contents, known)
    return made
