"""One report of all ranks, and an error of one rank on all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from trainkit.errors import TrainkitError
from trainkit.lit.proof.report import Report


def of_all_ranks(trainer: Any, measure: Callable[[], Report]) -> Report:
    """The report of the rank that is furthest from exact, on every rank.

    A rank that fails lets the others wait for nobody: they raise its message.
    """
    if trainer.world_size == 1:
        return measure()
    own: Exception | None = None
    found: Any = None
    try:
        found = measure()
    except Exception as error:
        own, found = error, f"{type(error).__name__}: {error}"
    each: list[Any] = [None] * trainer.world_size
    dist.all_gather_object(each, found)
    if own is not None:
        raise own
    failed = [rank for rank, its in enumerate(each) if isinstance(its, str)]
    if failed:
        raise TrainkitError(f"check: rank {failed[0]} failed: {each[failed[0]]}")
    worst = max(range(len(each)), key=lambda rank: _badness(each[rank]))
    note = (
        f"each of {len(each)} ranks has measured its own rows; these are rank {worst}'s"
    )
    return replace(each[worst], notes=(*each[worst].notes, note))


def _badness(report: Report) -> tuple[bool, int, float]:
    return not report.exact, len(report.causes), report.deviation
