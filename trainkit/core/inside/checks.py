"""What is checked while a module runs in chunks."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from trainkit.core.gradients import HALF
from trainkit.core.inside.chunks import Chunk
from trainkit.core.inside.rows import are_close
from trainkit.errors import TrainkitError

ON_DEVICE, HALF_ON_DEVICE = 200, 4
"""On a device, sums in another order may be off by so many times more."""


class Check:
    """Compares a chunk's outputs in both passes: in backward passes 1, 2, 4, 8, ...

    Attributes:
        differs: whether chunks gave other values of an output without rows, as far as
            nobody has waited for the device that knows it.
    """

    def __init__(self) -> None:
        self.differs: Tensor | None = None
        self._num_passes = 0
        self._first: tuple[Chunk, list[Any]] | None = None

    @property
    def is_on(self) -> bool:
        """Whether the next backward pass is one that is looked at."""
        number = self._num_passes + 1
        return number & (number - 1) == 0

    def read(self, name: str) -> None:
        """Refuse what a call has found on a device, when the next one begins."""
        found, self.differs = self.differs, None
        if found is not None and found:
            raise TrainkitError(
                f"{name}: an output that has no rows must be the same for all chunks, "
                f"and in the call before this one it was not. Name a module within it, "
                f"or around it."
            )

    def ran(self, chunk: Chunk, outputs: Sequence[Any]) -> None:
        """A chunk has run in a forward pass, whose graph is not kept."""
        if self._first is None and self.is_on:
            copies = [
                x.detach().clone() if isinstance(x, Tensor) else x for x in outputs
            ]
            self._first = chunk, copies

    def ran_again(self, chunk: Chunk, outputs: Sequence[Any], name: str) -> None:
        """A chunk has run again, in the backward pass."""
        if self._first is None or self._first[0] is not chunk:
            return
        before, self._first = self._first[1], None
        for one, other in zip(before, outputs, strict=True):
            if not isinstance(one, Tensor):
                continue
            if one.device.type == "cpu":
                times = 1
            else:
                times = HALF_ON_DEVICE if one.dtype in HALF else ON_DEVICE
            if not are_close(one, other, times=times):
                raise TrainkitError(
                    f"{name}: a chunk of rows gives other outputs when it runs again "
                    f"in the backward pass. Its forward must not change anything that "
                    f"it depends on, and must not draw from a generator that is hidden "
                    f"from torch. Name a module within it that does not."
                )

    def passed(self) -> None:
        """A backward pass is over."""
        self._num_passes += 1
        self._first = None


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


def refuse_strangers(found: Sequence[Tensor], name: str) -> None:
    """Raise an error, if there are any."""
    if found:
        shapes = ", ".join(str(list(each.shape)) for each in found)
        raise TrainkitError(
            f"{name}: what trains must be a parameter of it or an argument, and its "
            f"output depends on a tensor of shape {shapes} that is neither, and would "
            f"get no gradient. Pass it as an argument, or make it a parameter of this "
            f"module."
        )


def leaves_of(outputs: Iterable[Any], *, refused: str = "") -> list[Tensor]:
    """The tensors that get a gradient from some outputs, read from their graph.

    Args:
        outputs: tensors and other values.
        refused: the name of a step that must not be in the graph.
    """
    found, seen = [], set()
    waiting: list[Any] = []
    for output in outputs:
        if isinstance(output, Tensor) and output.requires_grad:
            if output.grad_fn is None:
                found.append(output)
            waiting.append(output.grad_fn)
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if refused and node.name() == refused:
            raise LookupError(refused)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found.append(leaf)
        waiting += [following for following, _ in node.next_functions]
    return list({id(each): each for each in found}.values())
