"""Looking at each batch as `training_step` gets it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from trainkit.lit._compat import replaced
from trainkit.lit.base import is_taken_out


@contextmanager
def before_training_step(
    trainer: Any, callback: Any, look: Callable[[Any], object]
) -> Iterator[None]:
    """Call `look(batch)` right before each `training_step`.

    No hook of Lightning's stands there: `on_train_batch_start` of the module and of
    later callbacks may still edit the batch, and `training_step` may take it apart.

    Args:
        trainer: in `fit`.
        callback: on whose behalf; nothing is looked at while it is taken out.
        look: gets the batch.
    """
    run = trainer.strategy.training_step

    def training_step(batch: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_taken_out(callback, trainer):
            look(batch)
        return run(batch, *args, **kwargs)

    with replaced(trainer.strategy, training_step=training_step):
        yield
