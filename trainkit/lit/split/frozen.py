"""Frozen parameters that `training_step` itself moves, as it does a momentum encoder's.

It runs once for each micro-batch, so what it moves once for each batch moves several
times a step.
"""

from __future__ import annotations

import warnings
from typing import Any

from trainkit.core._compat import version_of


class FrozenParameters:
    """Looks whether frozen parameters stay as they are between micro-batches.

    Done with the first loader batch of several micro-batches: it costs a look at every
    parameter.

    Args:
        pl_module: what trains.
    """

    def __init__(self, pl_module: Any) -> None:
        self._module = pl_module
        self._versions: dict[str, int] = {}
        self._is_done = False

    def look(self, *, is_first: bool) -> None:
        """A micro-batch is about to run, the loader batch's first or another one."""
        if self._is_done:
            return
        before, self._versions = self._versions, self._frozen()
        if is_first:
            return
        self._is_done = True
        changed = [n for n, v in self._versions.items() if before.get(n, v) != v]
        if changed:
            _announce(changed)

    def _frozen(self) -> dict[str, int]:
        named = self._module.named_parameters()
        return {name: version_of(p) for name, p in named if not p.requires_grad}


def _announce(changed: list[str]) -> None:
    more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
    warnings.warn(
        f"micro_batching: training_step has changed {', '.join(changed[:3])}{more}, "
        f"which no optimizer moves, and it runs once for each micro-batch: they move "
        f"several times a step, and by the number of micro-batches, not as with the "
        f"whole batch. Move them in on_train_batch_end, which runs once a step.",
        stacklevel=2,
    )
