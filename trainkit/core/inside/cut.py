"""A module that runs in chunks of rows, and a call of it as autograd sees it; what the
inner cut and exact BatchNorm have in common."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.core.inside.chunks import Chunk, Sizes
from trainkit.core.inside.rows import Arguments
from trainkit.core.inside.shadows import Shadows
from trainkit.core.nested import Build, Field, take_apart
from trainkit.errors import TrainkitError

Around = Callable[[Any, Chunk | None], AbstractContextManager[Any]]


def nothing_around(call: Any, chunk: Any) -> AbstractContextManager[None]:
    """The context of a chunk that nobody looks at."""
    return contextlib.nullcontext()


class Replaced:
    """A module's forward, in chunks of rows; it stands on the instance.

    It is an object, not a function: a copy of the module then has a copy of it, which
    runs the copy, and both can be pickled.

    Args:
        module: whose forward is replaced.
        name: of the module, for messages.
        sizes: how large a chunk may be.

    Attributes:
        around: makes a context for each run of a chunk of a call; the chunk is None
            where rows are only looked at.
        was_called: whether it was called to train.
        was_cut: whether a call ran in chunks.
        most_rows: that a call had.
    """

    def __init__(self, module: nn.Module, name: str, sizes: Sizes) -> None:
        self.module, self.name, self.sizes = module, name, sizes
        self.around: Around = nothing_around
        self.was_called = self.was_cut = False
        self.most_rows = 0
        self._before: Any = vars(module).get("forward")

    @property
    def original(self) -> Any:
        """The module's own forward."""
        if self._before is not None:
            return self._before
        return type(self.module).forward.__get__(self.module)

    @property
    def trains(self) -> bool:
        """Whether a call would be one of training."""
        return self.module.training or torch.is_grad_enabled()

    def note_call(self, rows: int) -> None:
        """Note a call of so many rows."""
        self.was_called, self.most_rows = True, max(self.most_rows, rows)

    def install(self) -> None:
        """Take the place of the module's forward."""
        vars(self.module)["forward"] = self

    def remove(self) -> None:
        """Give the module its own forward back."""
        if vars(self.module).get("forward") is self:
            del vars(self.module)["forward"]
            if self._before is not None:
                vars(self.module)["forward"] = self._before


class Cut(Replaced):
    """What all calls of a module that is cut have in common.

    Args:
        module: whose forward runs in chunks.
        name: of the module, for messages.
        sizes: how large a chunk may be.
    """

    def __init__(self, module: nn.Module, name: str, sizes: Sizes) -> None:
        super().__init__(module, name, sizes)
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


class Node(torch.autograd.Function):
    """A call that has run in chunks, as autograd sees it: one node.

    Its call has the attributes `name`, `saved` (the tensors that must not change before
    the backward pass, which then raises as usual) and `differentiable` (which outputs
    have a gradient), and the method `backward`, from saved tensors and gradients of
    outputs to those of inputs.
    """

    @staticmethod
    def forward(ctx: Any, call: Any, outputs: Sequence[Tensor], *inputs: Tensor) -> Any:
        ctx.call = call
        ctx.save_for_backward(*call.saved)
        call.saved = ()
        pairs = zip(outputs, call.differentiable, strict=True)
        ctx.mark_non_differentiable(*[each for each, trains in pairs if not trains])
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:  # pyright: ignore
        if torch.is_grad_enabled():
            raise TrainkitError(
                f"{ctx.call.name}: it runs in chunks, so that its gradient has no "
                f"gradient of its own, which create_graph=True asks for. Name another "
                f"module to cut, or leave out the gradient penalty."
            )
        return (None, None, *ctx.call.backward(ctx.saved_tensors, gradients))
