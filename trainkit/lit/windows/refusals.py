"""Refuse by name what cannot be exact, as early as it can be known."""

from __future__ import annotations

import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from trainkit.core.accumulator import Accumulator
from trainkit.core.ranks import Ranks
from trainkit.core.strategies import Strategies
from trainkit.data.window_sampler import WindowSampler
from trainkit.errors import TrainkitError
from trainkit.lit._compat import num_batches_seen, unwrapped
from trainkit.lit.callback.base import has_callback, has_schedule

PATIENCE = timedelta(minutes=5)
"""How long a rank that has run out of batches waits for the others to run out too."""


def refuse_other_windows(trainer: Any, num_expected: int) -> None:
    """Refuse windows that are not those which a `WindowSampler` has planned."""
    for loader in tree_leaves(trainer.train_dataloader):
        plan = getattr(loader, "batch_sampler", None)
        is_scheduled = has_schedule(trainer)
        if isinstance(plan, WindowSampler) and (
            is_scheduled or plan.micro_batches != num_expected
        ):
            raise TrainkitError(
                f"trainer.accumulate_grad_batches: must be as many micro-batches as "
                f"WindowSampler plans for a window on each rank, "
                f"{plan.micro_batches}, received {num_expected}"
                f"{' and a schedule that changes it' if is_scheduled else ''}. Give "
                f"the Trainer accumulate_grad_batches={plan.micro_batches}, or "
                f"WindowSampler micro_batches={num_expected}, and leave schedules out."
            )


def undivided_step(optimizer: Any, accumulator: Accumulator) -> TrainkitError:
    return TrainkitError(
        f"{type(optimizer).__name__}.step(): its window of "
        f"{accumulator.num_micro_batches} micro-batches has not been divided, since "
        f"on_before_optimizer_step did not run. In optimizer_step, call "
        f"optimizer.step(closure=optimizer_closure) on the optimizer that Lightning "
        f"passes, and leave trainkit's callback in trainer.callbacks."
    )


def refuse_two_drivers(trainer: Any, callback: Any, kind: type) -> None:
    others = [c for c in trainer.callbacks if isinstance(c, kind) and c is not callback]
    if others:
        names = sorted(type(c).__name__ for c in [callback, *others])
        raise TrainkitError(
            f"accumulation: a window must be divided by one driver, and {len(names)} "
            f"are present ({', '.join(names)}). AccumulationMixin brings its own: with "
            f"it, remove AccumulationCallback from the Trainer; without, give one only."
        )


def refuse_no_strategy(accumulation: Any, who: str) -> None:
    if accumulation is None:
        raise TrainkitError(
            f"{who} must say what a micro-batch weighs, received None. Set it to what "
            f"the loss of training_step is a mean over: PerSample() for a mean over "
            f"samples; PerToken() for a mean over labels that are not ignored; "
            f"Uniform() only if all micro-batches have the same size, which is not "
            f"checked. A loss that compares rows needs none: "
            f"MicroBatching(size=8, inside='net') runs the submodule net in chunks of "
            f"rows. On the command line: accumulation=per_sample for trainkit "
            f"train, --accumulation=PerSample for trainkit fit."
        )


def refuse_assigned(pl_module: Any, name: str, before: Any) -> None:
    raise TrainkitError(
        f"{type(pl_module).__name__}.{name}: it was {before!r} when training began, "
        f"and {getattr(pl_module, name)!r} was assigned since. It cannot change during "
        f"a fit. Assign it before, in __init__ or setup(); for weights that change, "
        f"write a strategy whose weight() looks at what changes."
    )


def refuse_unknown_backend(trainer: Any) -> None:
    """Refuse a backend under which no rank gets the window's gradient."""
    strategy = trainer.strategy
    if strategy.handles_gradient_accumulation:
        raise TrainkitError(
            f"strategy {type(strategy).__name__}: it accumulates gradients by itself "
            f"and divides by its own count, so on_before_optimizer_step cannot correct "
            f"them. Use ddp, fsdp or ModelParallelStrategy."
        )
    if trainer.world_size > 1 and not (dist.is_available() and dist.is_initialized()):
        raise TrainkitError(
            f"strategy {type(strategy).__name__}: it runs {trainer.world_size} ranks "
            f"without torch.distributed, so their weights cannot be added up. Use ddp, "
            f"fsdp or ModelParallelStrategy."
        )


def refuse_several_terms(strategies: Strategies) -> None:
    """Refuse a loss of several terms in a streamed window."""
    if len(strategies) > 1:
        raise TrainkitError(
            f"accumulation: the terms {sorted(strategies)} have denominators of their "
            f"own, whose totals must be known before the first backward pass, so "
            f"loader batches must be cut, and they are not. Set "
            f"micro_batching = MicroBatching(size=4), say. Where training_step sees "
            f"the whole window, with inside= or exact BatchNorm, let it return the sum "
            f"of its terms, without strategies for them."
        )


def refuse_second_closure(optimizer: Any, num_batches: int) -> None:
    raise TrainkitError(
        f"{type(unwrapped(optimizer)).__name__}: it ran its closure twice in one step, "
        f"and the closure repeats only the last of the window's {num_batches} loader "
        f"batches. For such an optimizer, set accumulate_grad_batches=1, or cut loader "
        f"batches, micro_batching=MicroBatching(size=4), which wait for each other."
    )


def refuse_manual_optimization(pl_module: Any) -> None:
    if not pl_module.automatic_optimization:
        raise TrainkitError(
            f"{type(pl_module).__name__}: with automatic_optimization=False it runs "
            f"its own backward passes, which AccumulationCallback cannot weigh. Let "
            f"the class inherit AccumulationMixin and call self.accumulate()."
        )


def refuse_wide_under_scaler(scaler: Any) -> None:
    if scaler is not None:
        raise TrainkitError(
            "wide_gradients=True: under a gradient scaler (precision='16-mixed') the "
            "parameters and their gradients are float32 already, and the scaler must "
            "see the gradients before the window closes. Leave it out: it is for "
            "precision='bf16-true'."
        )


def refuse_no_optimizer(trainer: Any) -> None:
    groups = [group for o in trainer.optimizers for group in o.param_groups]
    if not any(group["params"] for group in groups):
        raise TrainkitError(
            "configure_optimizers: it returned no optimizer, so there is nothing to "
            "accumulate for. Return one, or leave out AccumulationCallback or "
            "AccumulationMixin."
        )


def not_in_fit(pl_module: Any) -> TrainkitError:
    return TrainkitError(
        f"{type(pl_module).__name__}: an epoch of Lightning's began, and "
        f"on_train_start of the callback that divides windows has not run, as where "
        f"Lightning's loop is run outside of fit. Call trainer.fit(module, data)."
    )


def refuse_open_window(index: int, accumulator: Accumulator) -> None:
    if accumulator.is_open:
        raise TrainkitError(
            f"optimizer {index}: step() was called while its window is open "
            f"({accumulator.num_micro_batches} micro-batches, not divided yet). Call "
            f"self.finish_window(optimizer) before it."
        )


def refuse_none_on_last_micro_batch() -> None:
    raise TrainkitError(
        "training_step: it returned None on the last micro-batch of a window under a "
        "gradient scaler, and Lightning then skips the whole window. Return a loss "
        "that weighs nothing instead, such as 0.0 * output.sum() for a batch of "
        "weight 0."
    )


def refuse_unequal_loaders(trainer: Any, ranks: Ranks) -> None:
    """Refuse loaders of unequal length; ranks wait for each other, once an epoch."""
    if ranks.size == 1:
        return
    length = trainer.num_training_batches
    known = -1.0 if length == float("inf") else float(length)
    row = torch.tensor([known], device=trainer.strategy.root_device)
    lengths = [int(row[0]) for row in ranks.gather_rows(row).tolist()]
    if len(set(lengths)) > 1:
        raise TrainkitError(
            f"train_dataloader: all ranks must have the same number of batches, and "
            f"they have {lengths} (-1: unknown). The others would wait forever for a "
            f"rank that has no batch. Use a distributed sampler, or "
            f"limit_train_batches."
        )


def make_meeting_point(ranks: Ranks) -> Any:
    """A group of ranks whose barrier has a time limit; all ranks create it together."""
    if ranks.size == 1:
        return None
    return dist.new_group(backend="gloo", timeout=PATIENCE)


def refuse_early_end(trainer: Any, meeting_point: Any) -> None:
    """Refuse an epoch that ends before its announced length on some ranks only.

    A rank waits only when its batches have ended and their number was not known. If it
    waits alone, it raises an error, so that the other ranks do not wait forever.
    """
    num_seen = num_batches_seen(trainer)
    if meeting_point is None or num_seen >= trainer.num_training_batches:
        return
    try:
        dist.monitored_barrier(meeting_point, timeout=PATIENCE, wait_all_ranks=True)
    except RuntimeError as error:
        raise TrainkitError(
            f"train_dataloader: rank {trainer.global_rank} has run out of batches "
            f"after {num_seen}, and other ranks have not ({error}). All ranks "
            f"must yield the same number of batches: split the stream evenly, or set "
            f"limit_train_batches to what every rank has."
        ) from error


def announce_scaled_gradients(optimizer: Any) -> None:
    warnings.warn(
        f"{type(optimizer).__name__}(fused=True) under a gradient scaler: it takes the "
        f"scaler's factor off inside step(). The step is right; callbacks that read "
        f"gradients in on_before_optimizer_step see them multiplied by that factor.",
        stacklevel=2,
    )


def announce_finders(trainer: Any) -> bool:
    """Warn of finders; returns whether there are any."""
    finders = [
        type(callback).__name__
        for callback in trainer.callbacks
        if has_callback([callback], "LearningRateFinder", "BatchSizeFinder")
    ]
    if finders:
        warnings.warn(
            f"{', '.join(finders)}: Lightning takes all other callbacks out while it "
            f"searches, so its trial steps use plain Lightning's gradients, not the "
            f"big batch's. What it suggests may not suit the training that follows.",
            stacklevel=2,
        )
    return bool(finders)


def announce_undivided_step(index: int) -> None:
    warnings.warn(
        f"optimizer {index}: it stepped with gradients that no window has divided, "
        f"since self.finish_window() was not called for it. If its losses come from "
        f"self.accumulate() of another optimizer, close both at once: "
        f"self.finish_window([first, second]). If it has no windows on purpose, ignore "
        f"this. This warning appears once.",
        stacklevel=2,
    )
