"""BatchNorm layers that share their statistics with other ranks."""

from __future__ import annotations

from torch import nn

from trainkit.core.batch_norm.layers import BatchNorm
from trainkit.core.inside.chunks import Sizes
from trainkit.core.ranks import Ranks
from trainkit.core.tape.forward import TapedForward


class SharedLayers:
    """Lets layers be normalised by the rows of all ranks, until `remove`.

    Those that a module in chunks calls are left to it.

    Args:
        module: what trains.
        ranks: that share statistics; nothing is to be done for one.
    """

    def __init__(self, module: nn.Module, ranks: Ranks) -> None:
        self._layers = [
            TapedForward(each, Sizes(), ranks, name)
            for name, each in module.named_modules()
            if isinstance(each, BatchNorm) and ranks.size > 1
        ]

    def install(self) -> None:
        """Take the place of their forwards."""
        for each in self._layers:
            each.install()

    def remove(self) -> None:
        """Give the layers their own forwards back."""
        for each in self._layers:
            each.remove()
