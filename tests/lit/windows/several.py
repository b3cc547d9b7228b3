"""Several trainings in one start of the ranks."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from typing import Any

from tests.helpers import RankError, run_ranks

Case = tuple[Any, ...]
"""A function that takes `(rank, world_size, *args)`, and its `args`."""


def run_cases(world_size: int, cases: Mapping[Any, Case]) -> dict[Any, list[Any]]:
    """What each case returns, in the order of the ranks: as `run_ranks` gives it.

    One case runs after the other in the processes of one start. A case that fails
    comes back as a `RankError`, and must fail on all ranks.
    """
    ranks = run_ranks(_all, world_size, list(cases.values()))
    return {
        name: [each[index] if isinstance(each, list) else each for each in ranks]
        for index, name in enumerate(cases)
    }


def _all(rank: int, world_size: int, cases: list[Case]) -> list[Any]:
    return [_one(rank, world_size, *case) for case in cases]


def _one(rank: int, world_size: int, function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(rank, world_size, *args)
    except Exception as error:
        text = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
        return RankError(text)
