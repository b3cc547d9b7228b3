"""The interface between the callback that divides windows and the cutting of them."""

from __future__ import annotations

from typing import Any, Protocol

from trainkit.core.accumulator import Accumulator
from trainkit.lit.callback.said_weight import SaidWeight


class Windows(Protocol):
    """The callback that divides windows, as far as their cutting needs it."""

    accumulators: dict[int, Accumulator]
    said: SaidWeight
    is_measured: bool

    def slots(self) -> int: ...

    def forget_means(self) -> None: ...

    def follow(self, pl_module: Any) -> None: ...
