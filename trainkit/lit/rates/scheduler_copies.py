"""Copies of a training's schedulers that do not disturb the training."""

from __future__ import annotations

import copy
from dataclasses import is_dataclass
from functools import partial
from types import CellType, FunctionType, ModuleType
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from trainkit.errors import TrainkitError

_KNOWN = ("torch.optim.", "trainkit.")
"""Whose schedulers compute a rate and do nothing else."""
_CONSTANT = (int, float, str, type(None), type, ModuleType)


def copy_schedulers(trainer: Any) -> tuple[Any, list[tuple[str, Any]]]:
    """The first optimizer, and each scheduler with its interval.

    Weights and moments are not copied. Functions are, with the variables around them:
    one that counts its calls has a count of its own here. (A second call of
    `configure_optimizers` would make others too. But it may register hooks, count, or
    communicate between ranks, and the training would notice that.)

    Raises:
        TrainkitError: a scheduler holds something of the user's that may notice.
    """
    optimizer = trainer.optimizers[0]
    configs = trainer.lr_scheduler_configs
    for config in configs:
        _refuse_what_may_notice(config.scheduler)
    shared = [p for group in optimizer.param_groups for p in group["params"]]
    memo: dict[int, Any] = {id(parameter): parameter for parameter in shared}
    memo[id(optimizer.state)] = {}
    schedulers = [(each.interval, each.scheduler) for each in configs]
    copied = copy.deepcopy((optimizer, schedulers), memo)
    known: dict[int, Any] = {}
    for _, scheduler in copied[1]:
        _with_own_functions(scheduler, known)
    return copied


def _refuse_what_may_notice(scheduler: Any) -> None:
    kind = type(scheduler)
    if not isinstance(scheduler, LRScheduler) or not kind.__module__.startswith(_KNOWN):
        raise TrainkitError(f"{kind.__name__} is none of torch's")
    for name, value in vars(scheduler).items():
        for each in value if isinstance(value, list | tuple) else [value]:
            if isinstance(each, LRScheduler):  # of a SequentialLR, say
                _refuse_what_may_notice(each)
            elif callable(each) and not _is_stateless(each):
                raise TrainkitError(
                    f"{name} of {kind.__name__} may remember something, or read what "
                    f"only the training has"
                )


def _is_stateless(value: Any) -> bool:
    """Whether it is a constant, or a function of such: of nothing that the training
    itself may change, or notice.

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


def _with_own_functions(value: Any, known: dict[int, Any]) -> Any:
    """A copied value whose functions are copies too, which `copy.deepcopy` leaves as
    they are; `known` has those that are made, by the identity of what they copy."""
    own = partial(_with_own_functions, known=known)
    if isinstance(value, LRScheduler):
        held = vars(value)
        held.update({name: own(each) for name, each in held.items()})
    elif type(value) in (list, tuple):
        return type(value)(map(own, value))
    elif isinstance(value, partial):
        named = {name: own(each) for name, each in value.keywords.items()}
        return partial(own(value.func), *map(own, value.args), **named)
    elif isinstance(value, FunctionType):
        return known.get(id(value)) or _copied(value, known)
    return value


def _copied(function: FunctionType, known: dict[int, Any]) -> FunctionType:
    """A function that sets no variable of the other's, global or around it."""
    scope = known.setdefault(id(function.__globals__), dict(function.__globals__))
    cells = function.__closure__ or ()
    own = tuple(known.setdefault(id(cell), CellType()) for cell in cells)
    made = FunctionType(function.__code__, scope, function.__name__, None, own)
    known[id(function)] = made
    made.__defaults__ = _with_own_functions(function.__defaults__, known)
    named = function.__kwdefaults__ or {}
    made.__kwdefaults__ = {k: _with_own_functions(v, known) for k, v in named.items()}
    for cell, copied in zip(cells, own, strict=True):
        copied.cell_contents = _with_own_functions(cell.cell_contents, known)
    return made
