"""A module's own forward for one micro-batch, by statistics that are known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.autograd.graph import saved_tensors_hooks

from trainkit.core.joins.branches import Branches
from trainkit.core.joins.intercepted import Intercepted
from trainkit.core.joins.net import Net
from trainkit.core.joins.program import Join, Untraceable
from trainkit.core.joins.statistics import Normal
from trainkit.core.nested import take_apart


class Replay:
    """Runs a module, whose layers normalise by given statistics.

    Args:
        ends: the calls of its layers, in order.
        normals: normalise in place of each.
        put_back: restore the random states before the first call, and behind each.
    """

    def __init__(
        self,
        ends: Sequence[Join],
        normals: Sequence[Normal],
        put_back: Sequence[Callable[[], None]],
    ) -> None:
        self._ends, self._normals, self._put_back = ends, normals, put_back
        self._number = 0

    def run(self, net: Net, values: list[Any], *, saves: bool = False) -> list[Any]:
        """The leaves of the output. Gradients are on or off as outside.

        Args:
            net: whose module runs.
            values: its arguments.
            saves: whether tensors are saved for a backward pass; `torch.func` needs it.
        """

        def forward() -> Any:
            if saves:
                return net.run(list(values))
            with saved_tensors_hooks(_nothing, _nothing):
                return net.run(list(values))

        self._put_back[0]()
        (output,) = Branches([forward], owner=self)
        return [field.value for field in take_apart(output)[0]]

    def called(self, module: Intercepted, args: Any, kwargs: Any) -> Any:
        """A module is called on the way."""
        if not module.normalises:
            return module.original(*args, **kwargs)
        number, self._number = self._number, self._number + 1
        if number >= len(self._ends) or self._ends[number].layer is not module.module:
            raise Untraceable("as it was traced, it calls its layers in another order")
        self._put_back[number + 1]()
        (x,) = [*args, *kwargs.values()]
        return self._normals[number](x)


def _nothing(value: Any) -> Any:
    return None
