"""BatchNorm over whole windows, while a `fit` runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trainkit.core.joins.inside import JoinedChunks
from trainkit.core.joins.layers import Sharing
from trainkit.core.joins.steps import JoinedSteps
from trainkit.core.ranks import Ranks


class Joined:
    """Lets BatchNorm see whole windows, until `stop`."""

    def __init__(self) -> None:
        self._chunks: JoinedChunks | None = None

    def join(
        self, pl_module: Any, memory: Any, ranks: Ranks, split: Any, inside: Any
    ) -> Sharing:
        """Join the statistics of a window's micro-batches.

        Args:
            pl_module: what trains.
            memory: `"auto"`, `"device"` or `"flat"`.
            ranks: that share a window.
            split: the driver, if loader batches are cut on the host.
            inside: the submodules that run in chunks, if some do.

        Returns:
            The ranks that share statistics.
        """
        sharing = Sharing(ranks)
        if split is not None:
            split.join(JoinedSteps(pl_module, memory, sharing))
            return sharing
        self._chunks = joined = JoinedChunks(pl_module, memory, sharing)
        joined.install()
        if inside is not None:
            inside.couple(joined)
        return sharing

    @contextmanager
    def bare(self, split: Any, inside: Any) -> Iterator[None]:
        """A context in which the module is as its author wrote it."""
        joined = [self._chunks, None if split is None else split.joined]
        taken = [*filter(None, joined), *(inside.cuts if inside else ())]
        for each in reversed(taken):
            each.remove()
        try:
            yield
        finally:
            for each in taken:
                each.install()

    def stop(self) -> None:
        """Give the layers back."""
        chunks, self._chunks = self._chunks, None
        if chunks is not None:
            chunks.remove()
