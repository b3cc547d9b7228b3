"""A check that rows which only fill places weigh nothing under the strategy."""

from __future__ import annotations

import copy
import warnings
from typing import Any

from trainkit.core.generators import random_kept
from trainkit.core.split.micro_batching import MicroBatching
from trainkit.core.strategies import Strategies, Uniform
from trainkit.data.filler import Filler
from trainkit.data.resumable import ResumableLoader
from trainkit.errors import TrainkitError
from trainkit.lit._compat import combined_loader
from trainkit.lit.probe.rows import rows_at
from trainkit.lit.proof.copying import read_apart


def refuse_fillers_that_count(
    trainer: Any,
    pl_module: Any,
    strategies: Strategies,
    micro_batching: MicroBatching | None,
) -> None:
    """Weigh one filler of each training loader that will give some.

    It is read from a copy of the data set, collated alone, and weighed as it is then.

    Raises:
        TrainkitError: it has a weight. In manual optimization, where the module may
            give weights itself, and among several loaders, this is a warning, and so
            is a filler that cannot be weighed.
    """
    # Uniform() counts every micro-batch in any case; a total has no denominator.
    weighing = [
        each
        for each in strategies.values()
        if not isinstance(each, Uniform) and each.loss_reduction != "total"
    ]
    combined = combined_loader(trainer)
    loaders = combined.flattened if weighing else ()
    is_sure = len(loaders) == 1 and pl_module.automatic_optimization
    for loader in (each for each in loaders if _will_fill(trainer, each)):
        for strategy in weighing:
            weight: float | None = None
            try:
                with random_kept(trainer.strategy.root_device):
                    batch = _filler(loader, combined, micro_batching)
                    weight = float(strategy.weight(batch))
                found = f"it weighs {weight:g}"
            except Exception as error:
                found = f"this cannot be seen ({type(error).__name__}: {error})"
            if weight == 0:
                continue
            text = _text(strategy, loader, found)
            if weight is not None and is_sure:
                raise TrainkitError(text)
            if trainer.is_global_zero:
                warnings.warn(text, stacklevel=2)


def _will_fill(trainer: Any, loader: Any) -> bool:
    """Whether a loader will give fillers before the epoch ends."""
    is_ours = isinstance(loader, ResumableLoader) and loader.gives_fillers
    return is_ours and trainer.num_training_batches >= len(loader)


def _filler(
    loader: ResumableLoader, combined: Any, micro_batching: MicroBatching | None
) -> Any:
    """A batch of one filler, in the place of each of the loaders."""
    batch = loader.collate_fn(list(rows_at(read_apart(loader.dataset), [Filler(0)])))
    if micro_batching is not None and micro_batching.collate is not None:
        batch = micro_batching.collate(batch)
    again = copy.copy(combined)
    again.flattened = [batch] * len(combined.flattened)
    return again.iterables


def _text(strategy: Any, loader: ResumableLoader, what: str) -> str:
    how = "last='pad'" if loader.last == "pad" else "weigh_nothing="
    instead = "last='weight'" if loader.last == "pad" else "no weigh_nothing="
    return (
        f"{type(strategy).__name__}: a row with which ResumableLoader({how}) fills a "
        f"place must weigh nothing, and {what}. Use PerSample(mask=...) with a field "
        f"that weigh_nothing sets to 0, or PerToken() with labels that it sets to "
        f"ignore_index; or {instead}."
    )
