"""What the callback that divides windows lends to what cuts them."""

from __future__ import annotations

from typing import Any, Protocol

from trainkit.core.accumulator import Accumulator


class Windows(Protocol):
    """What the callback that divides windows lends."""

    accumulators: dict[int, Accumulator]

    def slots(self) -> int: ...

    def forget_means(self) -> None: ...

    def follow(self, pl_module: Any) -> None: ...
