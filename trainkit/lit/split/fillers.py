"""A check that rows which only fill places weigh nothing under the strategy."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from torch.utils.data import DataLoader

from trainkit.core.generators import random_kept
from trainkit.core.split.micro_batching import MicroBatching
from trainkit.core.strategies import Strategies, Uniform
from trainkit.data.filler import Filler
from trainkit.data.resumable import ResumableLoader
from trainkit.errors import TrainkitError
from trainkit.lit._compat import combined_loader, has_own, leaves_places_empty
from trainkit.lit.proof.copying import Copies, read_apart


def refuse_fillers_that_count(
    trainer: Any,
    pl_module: Any,
    strategies: Strategies,
    micro_batching: MicroBatching | None,
) -> None:
    """Weigh one filler of each training loader that will give some.

    It is read as in training, worker and hooks included, and weighed as `training_step`
    gets it, by copies of the data set and of the module.

    Raises:
        TrainkitError: it has a weight. In manual optimization, where the module may
            give weights itself, this is a warning, and so is a filler that cannot be
            weighed.
    """
    # Uniform() counts every micro-batch in any case; a total has no denominator.
    weighing = [
        each
        for each in strategies.values()
        if not isinstance(each, Uniform) and each.loss_reduction != "total"
    ]
    combined = combined_loader(trainer)
    loaders = combined.flattened if weighing else ()
    fills = [each for each in loaders if _will_fill(trainer, each)]
    copied = Copies(trainer, pl_module).module if fills else None
    for loader in fills:
        for strategy in weighing:
            weight: float | None = None
            try:
                with random_kept(trainer.strategy.root_device):
                    batch = _read(loader, micro_batching)
                    weigh = partial(_weigh, trainer, copied, strategy)
                    weight = _weight_among(combined, loader, batch, weigh)
                found = f"it weighs {weight:g}"
            except Exception as error:
                found = f"this cannot be seen ({type(error).__name__}: {error})"
            if weight == 0:
                continue
            text = _text(strategy, loader, found)
            if weight is not None and pl_module.automatic_optimization:
                raise TrainkitError(text)
            if trainer.is_global_zero:
                warnings.warn(text, stacklevel=2)


def _will_fill(trainer: Any, loader: Any) -> bool:
    """Whether a loader will give fillers before the epoch ends."""
    is_ours = isinstance(loader, ResumableLoader) and loader.gives_fillers
    return is_ours and trainer.num_training_batches >= len(loader)


def _weigh(trainer: Any, copied: Any, strategy: Any, batch: Any) -> float:
    """The weight of a batch after the hooks of a transfer, as copies have them."""
    batch = trainer.precision_plugin.convert_input(batch)
    data, device = copy.copy(trainer.datamodule), trainer.strategy.root_device
    for hook, *more in (
        ("on_before_batch_transfer", 0),
        ("transfer_batch_to_device", device, 0),
        ("on_after_batch_transfer", 0),
    ):
        owner = data if data is not None and has_own(data, hook) else copied
        batch = getattr(owner, hook)(batch, *more)
    return float(strategy.weight(batch))


def _weight_among(
    combined: Any, loader: ResumableLoader, batch: Any, weigh: Callable[[Any], float]
) -> float:
    """The weight of a batch beside other loaders, which have ended or continue."""
    try:
        return weigh(_among(combined, loader, batch, None))
    except Exception:
        if leaves_places_empty(combined):
            raise
        # The strategy may need a batch of each loader: this one stands in for all.
        with suppress(Exception):
            if weigh(_among(combined, loader, batch, batch)) == 0:
                return 0.0
        raise


def _among(combined: Any, loader: ResumableLoader, batch: Any, other: Any) -> Any:
    """The batch that all loaders give together, from one loader's batch and another
    value for the other loaders."""
    again = copy.copy(combined)
    again.flattened = [batch if x is loader else other for x in combined.flattened]
    return again.iterables


def _read(loader: ResumableLoader, micro_batching: MicroBatching | None) -> Any:
    batches: Any = [[Filler(0)]]
    # By a loader: the data set may open files that must not be open before workers.
    again = DataLoader(
        read_apart(loader.dataset),
        batch_sampler=batches,
        collate_fn=loader.collate_fn,
        num_workers=min(loader.num_workers, 1),
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
    )
    (batch,) = again
    if micro_batching is not None and micro_batching.collate is not None:
        return micro_batching.collate(batch)
    return batch


def _text(strategy: Any, loader: ResumableLoader, what: str) -> str:
    how = "last='pad'" if loader.last == "pad" else "weigh_nothing="
    instead = "last='weight'" if loader.last == "pad" else "no weigh_nothing="
    return (
        f"{type(strategy).__name__}: a row with which ResumableLoader({how}) fills a "
        f"place must weigh nothing, and {what}. Use PerSample(mask=...) with a field "
        f"that weigh_nothing sets to 0, or PerToken() with labels that it sets to "
        f"ignore_index; or {instead}."
    )
