"""Which proof a run begins with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainkit.lit.batch_size.effective import may_be_several
from trainkit.lit.measure.at_start import ProofAtStart
from trainkit.lit.measure.inside import ProofInside


def begin_proof(
    trainer: Any, pl_module: Any, windows: Any, **options: Any
) -> Callable[..., None]:
    """What proves a run in its first `training_step`.

    It does nothing where that is off, or where a window is always one batch that runs
    as it is.

    Args:
        trainer: about to train.
        pl_module: what it trains.
        windows: the callback that divides windows.
        **options: of `ProofAtStart`.
    """
    if windows.proof == "off":
        return _nothing
    of = trainer, pl_module, windows.strategies, windows.proof
    has_parts = trainer.world_size > 1 or may_be_several(trainer, pl_module, windows)
    between: ProofAtStart | None = None
    if has_parts and windows.has_strategy:
        between = ProofAtStart(*of, **options)
    cuts = windows.inside
    within = None if cuts is None else ProofInside(*of, cuts=cuts)

    def prove(batch: Any, *args: Any, **kwargs: Any) -> None:
        if within is not None:
            within.run(batch, *args, **kwargs)
        if between is not None:
            with windows.uncut() as steps:
                between.joined = steps
                between.run(batch, *args, **kwargs)

    return prove


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass
