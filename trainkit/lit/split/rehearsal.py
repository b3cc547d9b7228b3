"""A run of `training_step` for its loss alone."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from trainkit.core.strategies import Strategies
from trainkit.lit._compat import replaced, uncompiled
from trainkit.lit.rerun.quietly import log_nothing
from trainkit.lit.split.outputs import taken_apart, terms_of


def rehearsed(
    pl_module: Any, strategies: Strategies, batch: Any, *args: Any, **kwargs: Any
) -> list[Tensor]:
    """The terms of the loss that `training_step` returns; its logs are dropped.

    Args:
        pl_module: the module that trains.
        strategies: the strategies of the loss, by term.
        batch: the batch on the device.
        *args: further arguments of `training_step`.
        **kwargs: further keyword arguments of `training_step`.
    """
    with replaced(pl_module, log=uncompiled(pl_module, log_nothing)):
        output = pl_module.training_step(batch, *args, **kwargs)
    if output is None:
        return []
    loss, _ = taken_apart(output)
    return list(terms_of(loss, strategies).values())
