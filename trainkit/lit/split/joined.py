"""Micro-batches that take turns, so that BatchNorm sees the whole window."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

from torch import Tensor

from trainkit.core.joins.steps import JoinedSteps
from trainkit.core.joins.turns import Turns
from trainkit.core.strategies import Strategies
from trainkit.errors import TrainkitError
from trainkit.lit._compat import replaced
from trainkit.lit.callback.said_weight import LeftInTurns, SaidWeight
from trainkit.lit.split.arriving import Transfer
from trainkit.lit.split.micro_batches import CutBatch
from trainkit.lit.split.passes import Passes


class TurningPasses:
    """Runs the steps of all micro-batches in turns: they wait for each other where they
    call a module with BatchNorm.

    Args:
        pl_module: the module that trains.
        joined: runs such calls for all of them.
        passes: run what a micro-batch does by itself.
        transfer: brings micro-batches to the device.
        said: holds the weight of a loss, if `training_step` says it.
    """

    def __init__(
        self,
        pl_module: Any,
        joined: JoinedSteps,
        passes: Passes,
        transfer: Transfer,
        said: SaidWeight,
    ) -> None:
        self.joined = joined
        self._module, self._passes, self._said = pl_module, passes, said
        self._transfer = transfer

    def run(
        self, current: CutBatch, strategies: Strategies, args: Any, kwargs: Any
    ) -> None:
        """Run all micro-batches of a loader batch.

        Args:
            current: the loader batch.
            strategies: weigh them.
            args: further arguments of `training_step`.
            kwargs: further keyword arguments of `training_step`.
        """
        arriving = self._transfer.each(current)
        turns = Turns([current, self._said])
        left = LeftInTurns(self._module, strategies)

        def step(index: int) -> Any:
            next(arriving)
            return self._passes.step(current, args, kwargs)

        def switched(index: int) -> None:
            left.turn(index)
            turns(index)

        steps = [partial(step, index) for index in range(len(current.parts))]
        with self._passes.said(current):
            for output in self.joined.run(steps, switched):
                self._passes.take(current, output, partial(self._backward, current))
        next(arriving, None)

    def _backward(self, current: CutBatch, loss: Tensor, optimizer: Any) -> None:
        """Run a backward pass down to where all micro-batches wait; the last one then
        completes those of all, before any hook sees the gradients."""
        own = self._module.backward

        def backward(*args: Any, **kwargs: Any) -> None:
            own(*args, **kwargs)
            if current.is_last:
                self.joined.backward()

        options = {"retain_graph": True} if self.joined.needs_graph else {}
        _refuse_backward_without(options, self._module)
        with replaced(self._module, backward=backward):
            self._passes.backward(loss, optimizer, **options)


def _refuse_backward_without(options: dict[str, Any], pl_module: Any) -> None:
    """Refuse a `backward` of the module's own that does not take some options."""
    if not options:
        return
    try:
        inspect.signature(pl_module.backward).bind(None, **options)
    except TypeError as error:
        name = type(pl_module).__name__
        raise TrainkitError(
            f"{name}.backward: exact BatchNorm calls it with {', '.join(options)}, "
            f"since what runs before the net is needed again when the window ends, and "
            f"it takes no such argument. Write it as Lightning's: def backward(self, "
            f"loss, *args, **kwargs), and hand them on to loss.backward."
        ) from error
