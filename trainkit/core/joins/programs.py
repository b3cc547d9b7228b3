"""The forwards of a module in segments, one for each kind of call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from trainkit.core.inside.rows import are_equal
from trainkit.core.inside.settings import settings_of
from trainkit.core.joins.net import Net
from trainkit.core.joins.program import Program, Untraceable
from trainkit.core.joins.tracing import autocast_now, looks_of, traced

MOST_PROGRAMS = 16
"""So many kinds of calls of a module are remembered."""


class Programs:
    """The forwards of a module in segments, which are traced once.

    Args:
        module: whose forwards.

    Attributes:
        why_not: why the module does not run in segments, if it was tried.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._found: dict[Any, Program | str] = {}
        self.why_not = ""

    def get(self, net: Net, arguments: Sequence[list[Any]]) -> Program | None:
        """The module's forward in segments; None if it cannot be split."""
        key = self._key(arguments[0])
        if key not in self._found:
            if len(self._found) >= MOST_PROGRAMS:
                self._found.clear()
            try:
                _refuse_unlike(arguments)
                self._found[key] = traced(net, arguments[0])
            except Untraceable as error:
                self._found[key] = str(error)
        found = self._found[key]
        if isinstance(found, str):
            self.why_not = found
            return None
        return found

    def give_up(self, arguments: Sequence[list[Any]], why: str) -> None:
        """Note that a call ran in segments, and why such calls cannot."""
        self._found[self._key(arguments[0])] = self.why_not = why

    def _key(self, values: Sequence[Any]) -> Any:
        """What a call has in common with others that run the same operations."""
        return (
            frozenset(settings_of(self._module).items()),
            looks_of(self._module),
            autocast_now(),
            *((id(each), each.requires_grad) for each in self._module.parameters()),
            *(
                (value.ndim, value.requires_grad)
                if isinstance(value, Tensor)
                else (type(value), repr(value))
                for value in values
            ),
        )


def _refuse_unlike(arguments: Sequence[list[Any]]) -> None:
    """Arguments that are no tensors must be the same for all micro-batches."""
    for other in arguments[1:]:
        for one, value in zip(arguments[0], other, strict=True):
            if not isinstance(value, Tensor) and not are_equal(one, value):
                raise Untraceable("an argument that is no tensor differs")
