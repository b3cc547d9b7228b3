"""Errors for windows that cannot be exact: each names its cause."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from trainkit.core._compat import communication_hooks, has_reduced
from trainkit.core.ranks import Ranks, averaged_by_fsdp
from trainkit.core.terms import refuse_shape
from trainkit.core.window import Window
from trainkit.errors import TrainkitError


def refuse_backward(window: Window, ranks: Ranks, loss: Any) -> None:
    """Refuse a backward pass that would break the window."""
    window.refuse_torn()
    refuse_shape("loss", loss, window.reduction)
    if not loss.requires_grad:
        raise TrainkitError(
            "loss: must depend on parameters that require a gradient, and does not. "
            "Compute it outside torch.no_grad(), do not detach it, and leave at least "
            "one parameter unfrozen."
        )
    held = len(window.entries) + (window.carried is not None)
    refuse_static_graph(ranks.ddp, held + 1)


def refuse_static_graph(
    ddp: DistributedDataParallel | None, num_micro_batches: int
) -> None:
    """Refuse a window of several micro-batches, whose first backward passes fail."""
    if ddp is not None and ddp.static_graph and num_micro_batches > 1:
        raise TrainkitError(
            f"static_graph=True: DDP cannot run a window of several micro-batches with "
            f"it, received {num_micro_batches}. Make the DDP module, or Lightning's "
            f"DDPStrategy, with static_graph=False, or make each window one "
            f"micro-batch."
        )


def refuse_unfinished_reduction(ddp: DistributedDataParallel) -> None:
    """Refuse now what torch reports only in the next forward pass, after the step."""
    if not has_reduced(ddp):
        raise TrainkitError(
            "DistributedDataParallel: the window's last backward pass did not reach "
            "all parameters, so DDP did not average the gradients over ranks. If only "
            "some micro-batches use a parameter, set find_unused_parameters=True: "
            "DDPStrategy(find_unused_parameters=True)."
        )


def refuse_unreduced(
    by_ddp: AbstractSet[int], module: Any, parameters: Sequence[Tensor]
) -> None:
    """Refuse parameters that no backend averages: they differ between ranks."""
    left_out = [
        parameter
        for parameter in parameters
        if parameter.requires_grad and id(parameter) not in by_ddp
        if not averaged_by_fsdp(parameter, module)
    ]
    if left_out:
        raise TrainkitError(
            f"parameters: {len(left_out)} to be stepped, the first of shape "
            f"{list(left_out[0].shape)}, are not averaged by DDP or FSDP2: they are "
            f"outside of it, ignored, not sharded, or were frozen when DDP was made. "
            f"Wrap the module that holds them all, and wrap it again after unfreezing. "
            f"If you average them yourself, pass aggregation='mean', and no DDP module."
        )


def check_hooks(ranks: Ranks) -> None:
    """Refuse communication hooks that may not do what `aggregation` says: torch's own
    average, with two exceptions that leave ranks apart."""
    if ranks.ddp is None or not ranks.backend_sums:
        return
    hooks = communication_hooks(ranks.ddp)
    names = [f"{hook.__module__}.{hook.__qualname__}" for hook in hooks]
    averages = all(
        name.startswith("torch.distributed.algorithms.ddp_comm_hooks")
        and "noop" not in name
        and "post_localSGD" not in name
        for name in names
    )
    if averages == (ranks.aggregation == "sum"):
        raise TrainkitError(
            f"aggregation={'sum' if averages else 'auto'!r}: must be what DDP does to "
            f"gradients, and with the communication hooks {names} it "
            f"{'averages them' if averages else 'may not average them'}. Name what it "
            f"leaves on all ranks, 'mean' or 'sum'; a hook that leaves ranks apart has "
            f"to go."
        )


def refuse_dividing_backward(backward: Any) -> None:
    """Refuse Accelerate's `backward` if it would divide once more (accelerate#3533)."""
    owner = getattr(backward, "__self__", None)
    if not type(owner).__module__.startswith("accelerate."):
        return
    steps = getattr(owner, "gradient_accumulation_steps", 1)
    if steps != 1:
        raise TrainkitError(
            f"backward=accelerator.backward: it divides the loss by its own "
            f"gradient_accumulation_steps={steps}, and trainkit divides the window "
            f"already. Pass the backward of Accelerator(gradient_accumulation_steps=1)."
        )
