"""Running `training_step` for its loss alone."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from trainkit.core.strategies import Strategies
from trainkit.lit._compat import replaced, uncompiled
from trainkit.lit.split.outputs import taken_apart, terms_of


def rehearsed(
    pl_module: Any, strategies: Strategies, batch: Any, *args: Any, **kwargs: Any
) -> list[Tensor]:
    """The terms of a loss, by `training_step` alone; what it logs is not heard.

    Args:
        pl_module: what trains.
        strategies: of the loss, by term.
        batch: on the device.
        *args: what `training_step` gets besides.
        **kwargs: further keyword arguments of `training_step`.
    """
    with replaced(pl_module, log=uncompiled(pl_module, _unheard)):
        output = pl_module.training_step(batch, *args, **kwargs)
    if output is None:
        return []
    loss, _ = taken_apart(output)
    return list(terms_of(loss, strategies).values())


def _unheard(*args: Any, **kwargs: Any) -> None: ...
