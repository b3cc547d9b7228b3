"""The forwards of a module in segments, one for each kind of call."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.core.inside.closeness import are_equal
from trainkit.core.inside.moment import settings_of
from trainkit.core.joins.net import Net
from trainkit.core.joins.program import Program, Untraceable
from trainkit.core.joins.sameness import Is
from trainkit.core.joins.tracing import autocast_now, traced

MOST_PROGRAMS = 16
"""So many kinds of calls of a module are remembered."""

PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
"""The kinds of arguments that are known to say all by themselves."""


class Programs:
    """The forwards of a module in segments.

    Each window is traced, since the code that runs between modules may depend on
    anything. Where its operations are those of another window, that one's segments run.

    Args:
        module: whose forwards.

    Attributes:
        why_not: why the module does not run in segments, if it was tried.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._found: dict[Hashable, Program | str] = {}
        self.why_not = ""

    def get(self, net: Net, arguments: Sequence[list[Any]]) -> Program | None:
        """The module's forward in segments; None if it cannot be split."""
        try:
            _refuse_unlike(arguments)
            trace = traced(net, arguments)
            key = self._key(net, arguments), trace.sameness()
            if key not in self._found:
                if len(self._found) >= MOST_PROGRAMS:
                    del self._found[next(iter(self._found))]
                self._found[key] = trace.program()
        except Untraceable as error:
            self.why_not = str(error)
            return None
        found = self._found[key]
        if isinstance(found, str):
            self.why_not = found
            return None
        found.build = trace.entry.build
        return found

    @property
    def known(self) -> list[Program | str]:
        """Those that are remembered, and why others cannot run."""
        return list(self._found.values())

    def give_up(self, program: Program, why: str) -> None:
        """Note that a program has run, and why it cannot."""
        self.why_not = why
        for key, each in self._found.items():
            if each is program:
                self._found[key] = why

    def _key(self, net: Net, arguments: Sequence[Sequence[Any]]) -> Hashable:
        """What parts of the module that are not traced may depend on."""
        return (
            frozenset(settings_of(self._module).items()),
            autocast_now(),
            torch.is_grad_enabled(),
            tuple(map(Is, net.layers)),
            tuple((Is(each), each.requires_grad) for each in self._module.parameters()),
            frozenset(tuple(map(_look, values)) for values in arguments),
        )


def _look(value: Any) -> Hashable:
    """What an argument is like."""
    if not isinstance(value, Tensor):
        return None  # it stands in the trace
    return type(value), value.ndim, value.dtype, str(value.device), value.requires_grad


def _refuse_unlike(arguments: Sequence[list[Any]]) -> None:
    """Arguments that are no tensors must be the same for all micro-batches."""
    for several in zip(*arguments, strict=True):
        first = several[0]
        for other in several[1:]:
            if isinstance(first, Tensor) != isinstance(other, Tensor):
                raise Untraceable(
                    "an argument is a tensor in some micro-batches, and none in others"
                )
            if not isinstance(first, Tensor) and not are_equal(first, other):
                raise Untraceable("an argument that is no tensor differs")
        if not isinstance(first, (Tensor, *PLAIN)) and not callable(first):
            raise Untraceable(
                f"an argument is a {type(first).__name__}, whose content may differ"
            )
