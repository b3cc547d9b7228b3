"""Micro-batches that take turns, so that BatchNorm sees the whole window."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

from torch import Tensor

from trainkit.core.joins.steps import JoinedSteps
from trainkit.core.joins.turns import Turns
from trainkit.errors import TrainkitError
from trainkit.lit._compat import replaced
from trainkit.lit.callback.base import WindowOwner
from trainkit.lit.callback.said_weight import LeftInTurns
from trainkit.lit.split.micro_batches import CutBatch
from trainkit.lit.split.passes import Passes


def run_in_turns(
    joined: JoinedSteps,
    passes: Passes,
    windows: WindowOwner,
    current: CutBatch,
    module: Any,
    args: Any,
    kwargs: Any,
) -> None:
    """Run all micro-batches of a loader batch in turns: they wait for each other where
    they call a module with BatchNorm.

    Args:
        joined: runs such calls for all of them.
        passes: run what a micro-batch does by itself.
        windows: the callback that divides the windows.
        current: the loader batch.
        module: the module that trains.
        args: further arguments of `training_step`.
        kwargs: further keyword arguments of `training_step`.
    """
    arriving = passes.transfer.each(current)
    turns = Turns([current, windows.said])
    left = LeftInTurns(module, windows.accumulators[0].strategies)

    def step(index: int) -> Any:
        next(arriving)
        return passes.step(current, args, kwargs)

    def switched(index: int) -> None:
        left.turn(index)
        turns(index)

    def backward(loss: Tensor, optimizer: Any) -> None:
        """Run a backward pass down to where all micro-batches wait; the last one then
        completes those of all, before any hook sees the gradients."""
        own, is_last = module.backward, current.is_last

        def completed(*args: Any, **kwargs: Any) -> None:
            own(*args, **kwargs)
            if is_last:
                joined.backward()

        options = {"retain_graph": True} if joined.needs_graph else {}
        _refuse_backward_without(options, module)
        with replaced(module, backward=completed):
            passes.backward(loss, optimizer, **options)

    steps = [partial(step, index) for index in range(len(current.parts))]
    with passes.said(current):
        for index, output in enumerate(joined.run(steps, switched)):
            passes.take(current, output, backward)  # it may switch
            del current.on_device[index]
    next(arriving, None)


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
