"""What all calls of a module that is cut have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from trainkit.core.inside.checks import Check
from trainkit.core.inside.chunks import Chunk, Sizes
from trainkit.core.inside.draws import Draws
from trainkit.core.inside.keep import Keeper
from trainkit.core.inside.padding import PaddingCheck
from trainkit.core.inside.sharded import Shards
from trainkit.core.inside.sums import Shares

Around = Callable[[Any, Chunk | None], AbstractContextManager[Any]]


class Coupling(Protocol):
    """Layers of a module by which rows see each other, and how all of them do."""

    @property
    def spans_ranks(self) -> bool:
        """Whether rows of other ranks are seen, so that a single chunk counts too."""
        ...

    def uncoupled(self, module: nn.Module) -> AbstractContextManager[None]:
        """A context in which the rows of a module do not see each other."""
        ...

    def call(self, cut: Cut, plan: Any, values: list[Any], num_rows: int) -> Any:
        """A call whose chunks see each other; it has the methods of `Call`."""
        ...


def no_shares(num_rows: int) -> None:
    """Nothing looks at the chunks of a call."""


@dataclass(frozen=True)
class Cut:
    """A module that is cut, as each of its calls knows it.

    Attributes:
        module: whose forward runs in chunks.
        run: that forward, on a list of arguments.
        name: of the module, for messages.
        sizes: how large a chunk may be.
        draws: keeps random states.
        check: of the first calls.
        keeper: says how many chunks keep their graph.
        around: a context for each run of a chunk of a call.
        shares: what looks at the chunks of a call of so many rows, or None.
        shards: what FSDP2 shards within the module.
        padding: checks that the loss uses none, where chunks leave out columns.
        width: how many columns there are.
        turning: what holds something of the chunk under way, where chunks take turns.
    """

    module: nn.Module
    run: Callable[[list[Any]], Any]
    name: str
    sizes: Sizes
    draws: Draws
    check: Check
    keeper: Keeper
    around: Around
    shares: Callable[[int], Shares | None] = no_shares
    shards: Shards | None = None
    padding: PaddingCheck | None = None
    width: int = 0
    turning: Sequence[Any] = ()
