"""A checkpoint taken inside a window, and the run that resumes from it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel

from trainkit.core.accumulator import Accumulator
from trainkit.core.state import holders, load_partial, save_partial
from trainkit.lit.callback.base import WindowOwner
from trainkit.lit.resume._compat import batches_into_epoch

KEY = "trainkit"


def save(
    accumulators: Mapping[int, Accumulator],
    pl_module: Any,
    *,
    num_torn: int,
    alone: bool,
) -> dict[str, Any]:
    """What a checkpoint must hold so that the resumed run is exact.

    Args:
        accumulators: one for each optimizer.
        pl_module: the module that trains.
        num_torn: how many micro-batches the window has, if the last of them is under
            way. The resumed run will run that one again, and what it has left in the
            gradients cannot be taken out.
        alone: the other ranks may not be saving, so nothing can be asked of them.

    Returns:
        Tensors, numbers and strings only, so that `weights_only` loading works.
    """
    state: dict[str, Any] = {
        "num_windows": {i: a.num_windows for i, a in accumulators.items()}
    }
    is_open = any(a.is_open for a in accumulators.values())
    if num_torn == 1 or not (num_torn or is_open):
        return state
    held = sum(a.num_micro_batches for a in accumulators.values())
    lost = num_torn - 1 if num_torn else held
    ranks = next(iter(accumulators.values())).ranks
    no_scale = any(a.num_windows == 0 for a in accumulators.values())
    reasons = {
        "a micro-batch is under way": num_torn > 0,
        "FSDP1 keeps gradients in flat shards that no other run can place": any(
            isinstance(each, FullyShardedDataParallel) for each in pl_module.modules()
        ),
        "the other ranks cannot be asked for theirs": alone and ranks.size > 1,
        "ranks that no backend sums share no scale before a window has closed": (
            ranks.size > 1 and not ranks.backend_sums and no_scale
        ),
    }
    why = next((reason for reason, holds in reasons.items() if holds), None)
    if why is not None:
        warnings.warn(
            f"checkpoint: taken inside a window. The gradients of its first {lost} "
            f"micro-batches are not in it: {why}. A resumed run steps with the rest "
            f"only.",
            stacklevel=2,
        )
        state["lost"] = lost
        return state
    state["windows"] = {
        i: a.state_dict(over_ranks=True) for i, a in accumulators.items()
    }
    state["gradients"] = save_partial(_holders(pl_module, accumulators), ranks)
    return state


def without_state(
    checkpoint: Mapping[str, Any], num_expected: int
) -> dict[str, Any] | None:
    """What a checkpoint that trainkit did not see written has lost, or None."""
    lost = batches_into_epoch(checkpoint) % num_expected
    return {"num_windows": {}, "lost": lost} if lost else None


def restore(
    state: Mapping[str, Any], windows: WindowOwner, trainer: Any, pl_module: Any
) -> None:
    """Restore the open window that `save` has saved."""
    accumulators = windows.accumulators
    for index, num_windows in state["num_windows"].items():
        if index in accumulators:
            accumulators[index].num_windows = num_windows
    if "lost" in state:
        warnings.warn(
            f"checkpoint: it was taken inside a window and does not hold the "
            f"{state['lost']} micro-batches that the window had seen; its step is made "
            f"from the rest alone.",
            stacklevel=2,
        )
    for index, window in state.get("windows", {}).items():
        accumulators[index].load_state_dict(window)
    if "windows" in state:
        ranks = next(iter(accumulators.values())).ranks
        load_partial(_holders(pl_module, accumulators), state["gradients"], ranks)


def _holders(
    pl_module: Any, accumulators: Mapping[int, Accumulator]
) -> list[tuple[str, Tensor]]:
    named = list(pl_module.named_parameters())
    for accumulator in accumulators.values():
        named = holders(named, accumulator.gradients.wide)
    return named
