"""Copies of a training's schedulers, of which the training does not notice anything."""

from __future__ import annotations

import copy
import dis
from dataclasses import is_dataclass
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from trainkit.errors import TrainkitError

_KNOWN = ("torch.optim.", "trainkit.")
"""Whose schedulers compute a rate and do nothing else."""
_CONSTANT = (int, float, str, type(None), type, ModuleType)
_REBINDING = ("STORE_DEREF", "STORE_GLOBAL")
"""What a function does that declares a name nonlocal or global, and sets it."""


def copy_schedulers(trainer: Any) -> tuple[Any, list[tuple[str, Any]]]:
    """The first optimizer, and each scheduler with its interval.

    Weights and moments are not copied. `copy.deepcopy` takes functions as they are, so
    one that counts its calls would count those of the copy as well: functions are asked
    only if they hold nothing that could change.

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
    return copy.deepcopy((optimizer, schedulers), memo)


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
    """Whether it is a constant, or a function of such.

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
        if any(each.opname in _REBINDING for each in dis.get_instructions(value)):
            return False
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
