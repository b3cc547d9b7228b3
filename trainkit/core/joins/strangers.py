"""Tensors that train, and are neither a module's parameters nor arguments."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from trainkit.core.inside.shadows import leaves_of, refuse_strangers


class Strangers:
    """Refuses tensors that train, and are neither a module's parameters nor arguments.

    Two chunks' graphs of a call are compared: a leaf that is made anew in each run is
    no such thing, as that of transformers' `enable_input_require_grads`.

    Args:
        name: of the module, for messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._first: list[weakref.ref[Tensor]] | None = None

    @property
    def has_looked(self) -> bool:
        """Whether two graphs were compared, or the first had no such tensor."""
        return self._first is not None and not self._first

    def look(self, outputs: Sequence[Any], known: Iterable[Tensor]) -> None:
        """Look at the graph of a chunk.

        Args:
            outputs: of the chunk.
            known: the parameters and arguments that train.
        """
        if self.has_looked:
            return
        found = strangers(leaves_of(outputs), known)
        if self._first is None:
            self._first = [weakref.ref(each) for each in found]
            return
        ids = {id(each) for each in found}
        both = [each for ref in self._first if (each := ref()) is not None]
        self._first = []
        refuse_strangers([each for each in both if id(each) in ids], self._name)


def strangers(leaves: Iterable[Tensor], known: Iterable[Tensor]) -> list[Tensor]:
    """The leaves that are not known."""
    ids = {id(each) for each in known}
    return [each for each in leaves if id(each) not in ids]
