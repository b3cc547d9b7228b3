"""A module that is cut, as each of its calls knows it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.core.inside.chunks import Chunk, Sizes, checked_keep
from trainkit.core.inside.draws import States
from trainkit.core.inside.rows import Arguments, without_cache
from trainkit.core.inside.shadows import Shadows
from trainkit.core.nested import Field, take_apart
from trainkit.errors import TrainkitError

Around = Callable[[Any, Chunk | None], AbstractContextManager[Any]]


def nothing_around(call: Any, chunk: Any) -> AbstractContextManager[None]:
    """The context of a chunk that nobody looks at."""
    return contextlib.nullcontext()


class Cut:
    """What all calls of a module that is cut have in common.

    Args:
        module: whose forward runs in chunks.
        name: of the module, for messages.
        sizes: how large a chunk may be.
        keep: how many chunks keep their graph until the backward pass.

    Attributes:
        around: makes a context for each run of a chunk of a call; the chunk is None
            where rows are only looked at.
        draws_of_host: whether the module draws from NumPy's or Python's generator.
        differs: whether chunks gave other values of an output without rows, as far as
            nobody has waited for the device that knows it.
    """

    def __init__(
        self, module: nn.Module, name: str, sizes: Sizes, keep: int = 1
    ) -> None:
        self.module, self.name, self.sizes = module, name, sizes
        self.keep = checked_keep(keep)
        self.around: Around = nothing_around
        self.draws_of_host = False
        self.differs: Tensor | None = None
        self._shadows: Shadows | None = None

    @property
    def original(self) -> Callable[..., Any]:
        """The module's own forward."""
        return self.module.forward

    def run(self, arguments: Arguments, values: Sequence[Any]) -> Any:
        """The output of the module's own forward.

        Args:
            arguments: of a call.
            values: other values in place of its own.
        """
        positional, named = arguments.build(iter(values))
        with without_cache(self.module):
            return self.original(*positional, **named)

    def fields(
        self, call: Any, chunk: Chunk | None, arguments: Arguments, values: Any
    ) -> list[Field]:
        """The parts of that output, in the context of a chunk."""
        with self.around(call, chunk):
            return take_apart(self.run(arguments, values))[0]

    def states(self, devices: Collection[torch.device]) -> States:
        """The random states of now."""
        return States(devices, of_host=self.draws_of_host)

    def shadows(self, parameters: Sequence[Tensor]) -> Shadows:
        """What stands for the parameters that train."""
        if self._shadows is None or not self._shadows.fit(parameters):
            self._shadows = Shadows(self.module, parameters)
        return self._shadows

    def note(self, differs: Tensor | None) -> None:
        """Refuse what the call before this one has found on a device."""
        before, self.differs = self.differs, differs
        if before is not None and before:
            self.differs = None
            raise TrainkitError(
                f"{self.name}: an output that has no rows must be the same for all "
                f"chunks, and in the call before this one it was not. Name a module "
                f"within it, or around it."
            )


@contextlib.contextmanager
def noted(text: str) -> Iterator[None]:
    """An error that is raised meanwhile gets a note, where Python knows notes."""
    try:
        yield
    except Exception as error:
        getattr(error, "add_note", lambda _: None)(text)
        raise
