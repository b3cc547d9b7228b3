"""What belongs to the micro-batch under way, while micro-batches run in turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Turns:
    """Keeps for each micro-batch what some objects hold for the one under way.

    Args:
        parts: each names in `of_micro_batch` the attributes that belong to one.
    """

    def __init__(self, parts: Sequence[Any]) -> None:
        self._parts = parts
        self._fresh = self._held()
        self._waiting: dict[int, list[dict[str, Any]]] = {}
        self._now: int | None = None

    def __call__(self, index: int) -> None:
        """Let another micro-batch be the one under way."""
        if self._now is not None:
            self._waiting[self._now] = self._held()
        held = self._waiting.pop(index, self._fresh)
        for part, attributes in zip(self._parts, held, strict=True):
            for name, value in attributes.items():
                setattr(part, name, value)
        self._now = index

    def _held(self) -> list[dict[str, Any]]:
        return [
            {name: getattr(part, name) for name in part.of_micro_batch}
            for part in self._parts
        ]
