"""Loaders that believe they are one rank of several."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from trainkit.data.epoch_order import EpochOrder

Become = Callable[[int, int], None]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Become:
    """Says which rank of how many samplers are on from now on."""

    def become(rank: int, num_ranks: int) -> None:
        monkeypatch.setattr(EpochOrder, "ranks", (rank, num_ranks))

    return become
