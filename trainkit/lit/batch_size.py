"""The effective batch of a Trainer, and the size of its windows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch.utils.data import BatchSampler

from trainkit.core.plan.effective_batch import EffectiveBatch, Unit
from trainkit.core.plan.stages import WindowSize
from trainkit.core.strategies import Strategies, Uniform
from trainkit.data.window_sampler import WindowSampler
from trainkit.errors import TrainkitError
from trainkit.lit.callback.base import WindowOwner, has_callback, windows_of
from trainkit.lit.callback.table import Row


def read_effective_batch(trainer: Any) -> EffectiveBatch:
    """The effective batch: how many samples one optimizer step of a Trainer sees.

    Args:
        trainer: in `fit`, from `configure_optimizers` on.

    Raises:
        TrainkitError: the training loader has no batch size.
    """
    found = find_effective_batch(trainer)
    if found is None:
        raise TrainkitError(
            "effective batch: it must follow from the loader's batch size, and the "
            "training loader has none, as one of ready batches. Give the DataLoader a "
            "batch_size, or let WindowMonitor count: window/samples_seen."
        )
    return found


def find_effective_batch(
    trainer: Any,
    *,
    unit: Unit = "samples",
    micro_batch: float | None = None,
    accumulate: int | None = None,
) -> EffectiveBatch | None:
    """The effective batch, or None if it is not known.

    Args:
        trainer: in `fit`.
        unit: what to count.
        micro_batch: how much a micro-batch holds, if the user has given it.
        accumulate: how many of them a step took; default: as windows are now.
    """
    loader = train_loader(trainer)
    if micro_batch is None and unit == "samples":
        micro_batch = mean_micro_batch(loader)
    if micro_batch is None:
        return None
    return EffectiveBatch(
        micro_batch=micro_batch,
        accumulate=longest_window(trainer) if accumulate is None else accumulate,
        replicas=num_replicas(trainer),
        unit=unit,
    )


def longest_window(trainer: Any) -> int:
    """How many micro-batches a full window has, but at most those of an epoch."""
    size = int(trainer.accumulate_grad_batches)
    num_batches = trainer.num_training_batches
    return size if num_batches == float("inf") else max(min(size, int(num_batches)), 1)


def may_be_several(trainer: Any, pl_module: Any, windows: WindowOwner) -> bool:
    """Whether a window may have more than one micro-batch."""
    if windows.is_split or not pl_module.automatic_optimization:
        return True
    return may_have_batches(trainer)


def may_have_batches(trainer: Any) -> bool:
    """Whether a window may have more than one loader batch."""
    sizes = [longest_window(trainer), *scheduled_sizes(trainer).values()]
    return min(max(sizes), trainer.num_training_batches) > 1


def scheduled_sizes(trainer: Any) -> dict[str, int]:
    """The largest window that each callback will make which changes their size, by the
    callback's name."""
    found = {}
    for callback in trainer.callbacks:
        sizes: Iterable[int] = ()
        if has_callback([callback], "AccumulationSchedule"):
            sizes = callback.stages.sizes
        elif has_callback([callback], "GradientAccumulationScheduler"):
            sizes = callback.scheduling.values()
        found[type(callback).__name__] = max(sizes, default=1)
    return {name: size for name, size in found.items() if size > 1}


def num_replicas(trainer: Any) -> int:
    """How many ranks have their own data; tensor-parallel ranks share data."""
    return (trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1)


def steps_taken(trainer: Any) -> int:
    """How many steps have been taken by the first optimizer.

    Lightning's `global_step` adds up the steps of all optimizers.
    """
    windows = windows_of(trainer)
    if trainer.lightning_module.automatic_optimization or windows is None:
        return trainer.global_step
    if not windows.accumulators:
        return 0  # its on_train_start, which makes them, comes after the schedule's
    return windows.accumulators[0].num_windows


def train_loader(trainer: Any) -> Any:
    """The training loader, or loaders, as the Trainer uses them."""
    if trainer.train_dataloader is None:
        trainer.fit_loop.setup_data()  # as `estimated_stepping_batches` does
    return trainer.train_dataloader


def mean_micro_batch(loader: Any) -> float | None:
    """The batch size of a loader, or the mean of a full window's where one is planned;
    None if nothing says it."""
    plan = getattr(loader, "batch_sampler", None)
    if isinstance(plan, WindowSampler):
        rows = min(plan.window, plan.num_rows)
        return rows / (plan.micro_batches * plan.num_ranks)
    return micro_batch_of(loader)


def micro_batch_of(loader: Any) -> int | None:
    """The batch size of a loader, or of several loaders if theirs are equal."""
    if isinstance(loader, Mapping):
        loader = list(loader.values())
    if isinstance(loader, list | tuple):
        sizes = {micro_batch_of(each) for each in loader}
        return sizes.pop() if len(sizes) == 1 else None
    size = loader_batch_size(loader)
    if not isinstance(size, int) or size < 1:
        return None
    try:
        return min(size, len(loader.sampler)) or None
    except (AttributeError, TypeError):
        return size  # an iterable data set has no length


def loader_batch_size(loader: Any) -> Any:
    """The batch size of one loader, or None if something else cuts its batches."""
    size = getattr(loader, "batch_size", None)
    batch_sampler = getattr(loader, "batch_sampler", None)
    if size is None and type(batch_sampler) is BatchSampler:
        return batch_sampler.batch_size
    return size


def table_of_windows(trainer: Any, strategies: Strategies) -> list[Row]:
    """The rows on a step and an epoch, for the table before training."""
    step: Any = find_effective_batch(trainer)
    if step is None:
        step = (
            f"per-device batch not known x accumulation {longest_window(trainer)} x "
            f"ranks {num_replicas(trainer)}"
        )
    weighed = f", weighed by {_names(strategies)}" if strategies else ""
    rows = [("step", f"{step}{weighed}")]
    num_batches = trainer.num_training_batches
    is_scheduled = isinstance(trainer.accumulate_grad_batches, WindowSize)
    if num_batches != float("inf") and not is_scheduled:
        text = _windows_of_epoch(num_batches, int(trainer.accumulate_grad_batches))
        rows.append(("windows", f"{text} an epoch"))
    if any(isinstance(each, Uniform) for each in strategies.values()):
        text = "every micro-batch has weight 1, so the step is the big batch's only if"
        rows.append(("Uniform", f"{text} all have the same size"))
    return rows


def _names(strategies: Strategies) -> str:
    """
    >>> from trainkit import PerSample
    >>> _names({"": PerSample()}), _names({"ce": Uniform(), "kl": PerSample()})
    ('PerSample', 'Uniform (ce) and PerSample (kl)')
    """
    return " and ".join(
        type(each).__name__ + (f" ({term})" if term else "")
        for term, each in strategies.items()
    )


def _windows_of_epoch(num_batches: int, size: int) -> str:
    """
    >>> _windows_of_epoch(391, 4)
    '97 full windows + 1 short one (3 of 4 micro-batches)'
    >>> _windows_of_epoch(3, 8)
    '0 full windows + 1 short one (3 of 8 micro-batches)'
    """
    num_full, left = divmod(num_batches, size)
    text = f"{num_full} full window{'s' * (num_full != 1)}"
    if left:
        text += f" + 1 short one ({left} of {size} micro-batches)"
    return text
