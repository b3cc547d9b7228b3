"""User hooks that see the gradient of a micro-batch, not of the window."""

from __future__ import annotations

from typing import Any

from trainkit.core._compat import has_gradient_hook
from trainkit.core.batch_norm.layers import listed
from trainkit.lit._compat import has_own
from trainkit.lit.batch_size.effective import may_be_several
from trainkit.lit.callback.base import WindowOwner
from trainkit.lit.callback.table import Row


def early_hooks(trainer: Any, pl_module: Any, windows: WindowOwner) -> list[Row]:
    """The row of the table before training that names such hooks.

    There is no row if each window is one micro-batch.

    A hook that is linear in the gradient (a mask, a factor) gives the big batch's step.
    A hook that clips does not. Only its author knows which kind it is.

    Args:
        trainer: about to train.
        pl_module: what trains.
        windows: the callback that divides windows.
    """
    owners = [pl_module, *trainer.callbacks]
    found = [
        f"on_after_backward of {type(owner).__name__}"
        for owner in owners
        if has_own(owner, "on_after_backward")
        and not owner.on_after_backward.__module__.startswith("trainkit.")
    ]
    named = pl_module.named_parameters()
    hooked = [name for name, parameter in named if has_gradient_hook(parameter)]
    if hooked:
        found.append(f"hooks of {listed(hooked, at_most=2)}")
    if not found or not may_be_several(trainer, pl_module, windows):
        return []
    text = (
        f"{', '.join(found)}: they run once for each micro-batch, before the window's "
        f"gradient is complete; what clips or replaces gradients belongs in "
        f"on_before_optimizer_step"
    )
    return [("gradient hooks", text)]
