"""A module that is cut into chunks of rows, as each of its calls knows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from trainkit.core.inside.chunks import Chunk, Sizes, checked_keep
from trainkit.core.inside.replaced import Replaced
from trainkit.core.inside.rows import Arguments
from trainkit.core.inside.shadows import Shadows
from trainkit.core.nested import Build, Field, take_apart


class Cut(Replaced):
    """What all calls of a module that is cut have in common.

    Args:
        module: whose forward runs in chunks.
        name: of the module, for messages.
        sizes: how large a chunk may be.
        keep: how many chunks keep their graph until the backward pass.
    """

    def __init__(
        self, module: nn.Module, name: str, sizes: Sizes, keep: int = 1
    ) -> None:
        super().__init__(module, name, sizes)
        self.keep = checked_keep(keep)
        self._shadows: Shadows | None = None

    def run(
        self,
        arguments: Arguments,
        values: Sequence[Any],
        call: Any = None,
        chunk: Chunk | None = None,
    ) -> tuple[list[Field], Build]:
        """The parts of the output of the module's own forward.

        Models of transformers return a cache of keys in training too, where nothing
        reads it, and its rows cannot be joined: so that is turned off meanwhile.

        Args:
            arguments: of a call.
            values: other values in place of its own.
            call: which runs the chunk.
            chunk: that runs.
        """
        config: Any = getattr(self.module, "config", None)
        caches = getattr(config, "use_cache", False) is True
        try:
            if caches:
                config.use_cache = False
            with self.around(call, chunk):
                output = arguments.call(self.original, values)
            if isinstance(output, Tensor):
                return [Field("", output)], next
            return take_apart(output)
        finally:
            if caches:
                config.use_cache = True

    def shadows(self, parameters: Sequence[Tensor]) -> Shadows:
        """What stands for the parameters that train."""
        if self._shadows is None or not self._shadows.fit(parameters):
            self._shadows = Shadows(self.module, parameters)
        return self._shadows
