"""What a window cannot be made of, refused by name."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from trainkit.core._compat import communication_hooks, ignored_names, is_joining
from trainkit.errors import TrainkitError


def refuse_loss(loss: Any, reduction: str) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shown = list(loss.shape) if isinstance(loss, Tensor) else loss
        raise TrainkitError(
            f"loss: must be a tensor with one element, received {shown!r}. Reduce it "
            f"to what the strategy says: loss_reduction={reduction!r}."
        )
    if not loss.requires_grad:
        raise TrainkitError(
            "loss: must depend on parameters that require a gradient, and does not. Is "
            "it computed under torch.no_grad(), detached, or is the whole model frozen?"
        )


def refuse_zeroed(held: int, parameters: Sequence[Tensor]) -> None:
    """FSDP2 may hold gradients elsewhere until it brings them together."""
    if not held or not parameters:
        return
    if all(p.grad is None and not isinstance(p, DTensor) for p in parameters):
        raise TrainkitError(
            f"backward(): the window is open, and the gradients of the {held} "
            f"micro-batches in it are gone. Call optimizer.zero_grad() only after "
            f"optimizer.step(), at the end of a window."
        )


def refuse_unweighted(num_weighed: int, num_run: int) -> None:
    if num_weighed != num_run:
        raise TrainkitError(
            f"window: {num_weighed} losses were weighted, and {num_run} backward "
            f"passes came from them, so some gradient in it has no weight or two. "
            f"Start each pass from the loss that was passed on, once (an override of "
            f"LightningModule.backward must use its argument)."
        )


def refuse_static_graph(ddp: DistributedDataParallel | None, held: int) -> None:
    if ddp is not None and ddp.static_graph and held:
        raise TrainkitError(
            "static_graph=True: DDP cannot run a window of several micro-batches with "
            "it (its first backward passes fail inside torch). Make the DDP module "
            "with static_graph=False."
        )


def refuse_join(ddp: DistributedDataParallel | None) -> None:
    if ddp is not None and is_joining(ddp):
        raise TrainkitError(
            "DistributedDataParallel.join(): it answers for ranks that have run out of "
            "batches, and cannot answer for their windows. Give such ranks "
            "micro-batches of weight 0 instead."
        )


def refuse_unreduced(
    ddp: DistributedDataParallel, parameters: Sequence[Tensor]
) -> None:
    """Parameters that DDP does not average keep each rank's own gradient."""
    ignored = ignored_names(ddp)
    reduced = {
        id(p) for name, p in ddp.module.named_parameters() if name not in ignored
    }
    left_out = [p for p in parameters if p.requires_grad and id(p) not in reduced]
    if left_out:
        raise TrainkitError(
            f"parameters: {len(left_out)} of those to step, the first of shape "
            f"{list(left_out[0].shape)}, are not in the DistributedDataParallel module "
            f"or ignored by it, so nothing brings their ranks' gradients together. "
            f"Wrap the module that holds them all."
        )


def look_at_hooks(ddp: DistributedDataParallel) -> None:
    """Hooks of torch's own average, but for two; of others nobody knows."""
    for hook in communication_hooks(ddp):
        home = f"{hook.__module__}.{hook.__qualname__}"
        is_torch = home.startswith("torch.distributed.algorithms.ddp_comm_hooks")
        if is_torch and ("noop" in home or "post_localSGD" in home):
            raise TrainkitError(
                f"aggregation='auto': the communication hook {home} leaves the ranks' "
                f"gradients apart, so none is the window's. Remove it."
            )
        if not is_torch:
            warnings.warn(
                f"aggregation='auto': the communication hook {home} is taken to "
                f"average, as DistributedDataParallel does without one. Say "
                f"aggregation='mean' if so, or 'sum' if it adds up.",
                stacklevel=2,
            )


def refuse_dividing_backward(backward: Any) -> None:
    """Accelerate's `backward` divides by its own number of accumulation steps
    (accelerate#3533); with one step it divides by one."""
    owner = getattr(backward, "__self__", None)
    if not type(owner).__module__.startswith("accelerate."):
        return
    steps = getattr(owner, "gradient_accumulation_steps", 1)
    if steps != 1:
        raise TrainkitError(
            f"backward=accelerator.backward: it divides the loss by its own "
            f"gradient_accumulation_steps={steps}, and the window is divided already. "
            f"Make Accelerator(gradient_accumulation_steps=1) and pass its backward."
        )
