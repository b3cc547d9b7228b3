"""Refusals of the inner cut."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trainkit.core.inside.cut import Around, nothing_around
from trainkit.errors import TrainkitError
from trainkit.lit.batch_size.effective import may_be_several
from trainkit.lit.callback.base import WindowOwner


def refuse_several_unweighed(
    trainer: Any, pl_module: Any, windows: WindowOwner
) -> None:
    """Refuse windows of several loader batches of which nobody says what they weigh."""
    if pl_module.automatic_optimization and may_be_several(trainer, pl_module, windows):
        raise TrainkitError(
            f"accumulation: MicroBatching(inside=...) needs no strategy where one "
            f"loader batch is a step, and here a step has several "
            f"(accumulate_grad_batches={trainer.accumulate_grad_batches}). Give the "
            f"loader larger batches, which run in chunks of rows, and leave "
            f"accumulate_grad_batches at 1; or say what a loader batch weighs, such as "
            f"PerSample(), if the loss is a mean over that."
        )


def refusing_logs(pl_module: Any, name: str, then: Around = nothing_around) -> Around:
    """Makes the context of a chunk, in which nothing can be logged.

    Args:
        pl_module: what trains.
        name: of the module which runs in chunks.
        then: makes another context within.
    """

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise TrainkitError(
            f"self.log within {name}, which runs in chunks of rows, would log each "
            f"chunk's value, twice: return the value, and log it in training_step."
        )

    own = vars(pl_module)
    logs = [
        each for each in ("log", "log_dict", "log_exact") if hasattr(pl_module, each)
    ]

    @contextmanager
    def around(call: Any, chunk: Any) -> Iterator[None]:
        before = {each: own[each] for each in logs if each in own}
        try:
            own.update(dict.fromkeys(logs, refuse))
            with then(call, chunk):
                yield
        finally:
            for each in logs:
                own.pop(each, None)
            own.update(before)

    return around
