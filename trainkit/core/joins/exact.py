"""Exact BatchNorm for any loop."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeVar

from torch import nn

from trainkit.core.in_place_of import InPlaceOf
from trainkit.core.inside.chunks import Sizes
from trainkit.core.inside.forward import ChunkedForward
from trainkit.core.joins.engine import Memory
from trainkit.core.joins.inside import JoinedChunks
from trainkit.core.joins.layers import sharing_of
from trainkit.core.joins.steps import JoinedSteps
from trainkit.core.plan.options import check_whole_number
from trainkit.errors import TrainkitError

MicroBatch = TypeVar("MicroBatch")


class ExactBatchNorm(InPlaceOf):
    """A module whose BatchNorm layers are normalised by whole windows.

    `exact_batch_norm` makes it. It has the module's parameters under their own names,
    and can be called in its place.

    Attributes:
        needs_graph: whether losses must be pulled by `backward(retain_graph=True)`,
            since something that trains runs before the module.
    """

    def __init__(
        self, module: nn.Module, size: int | None, memory: Memory, process_group: Any
    ) -> None:
        super().__init__(module)
        sharing = sharing_of(process_group)
        self._chunked: ChunkedForward | None = None
        self._joined: JoinedSteps | JoinedChunks = JoinedSteps(module, memory, sharing)
        if size is not None:
            self._joined = JoinedChunks(module, memory, sharing)
            name = type(module).__name__
            self._chunked = ChunkedForward(module, name, Sizes(size))
            self._chunked.coupling = self._joined
        self._joined.install()
        if self._chunked is not None:
            self._chunked.install()

    @property
    def needs_graph(self) -> bool:
        return isinstance(self._joined, JoinedSteps) and self._joined.needs_graph

    def run(
        self, step: Callable[[MicroBatch], Any], micro_batches: Iterable[MicroBatch]
    ) -> Iterator[tuple[MicroBatch, Any]]:
        """Run a window of micro-batches.

            for micro_batch, loss in net.run(step, micro_batches):
                (loss * share_of(micro_batch)).backward()

        The gradients of the module arrive when the loop has ended.

        Args:
            step: computes the loss of a micro-batch, and calls the module.
            micro_batches: of the window, on this rank.
        """
        if not isinstance(self._joined, JoinedSteps):
            raise TrainkitError(
                "exact_batch_norm: size= cuts a whole batch where the module is "
                "called, and run() gets micro-batches. Leave size= out."
            )
        each, steps = list(micro_batches), self._joined
        results = steps.run([partial(step, one) for one in each])
        num_given = 0
        try:
            for pair in zip(each, results, strict=True):
                num_given += 1
                yield pair
        except GeneratorExit:
            if num_given == len(each):
                warnings.warn(
                    "exact_batch_norm: the loop over run() has stopped before its end, "
                    "and the gradients of the module arrive there. In a zip(), run() "
                    "comes first.",
                    stacklevel=2,
                )
            raise
        if not steps.has_gradients:
            raise TrainkitError(
                "exact_batch_norm: no gradient has come to the module. Call "
                "loss.backward() in the loop over run(), without inputs=; for outputs "
                "alone, open torch.no_grad() around it."
            )
        steps.backward()

    def remove(self) -> None:
        """Give the module its own forward back."""
        if self._chunked is not None:
            self._chunked.remove()
        self._joined.remove()

    def __enter__(self) -> nn.Module:
        return self._stands_for

    def __exit__(self, *error: Any) -> None:
        self.remove()


def exact_batch_norm(
    module: nn.Module,
    *,
    size: int | None = None,
    memory: Memory = "auto",
    process_group: Any = None,
) -> ExactBatchNorm:
    """Let the BatchNorm layers of a module see whole windows, in any loop.

    Each layer is normalised by the mean and variance of all rows of the window, on all
    ranks; its running statistics move once; the gradient is the big batch's. A window
    is a whole batch that the module is called with, which `size` cuts:

        net = exact_batch_norm(net, size=8)
        loss = any_loss(net(batch), labels)
        loss.backward()

    or the micro-batches that are given to `run`. Layers in evaluation mode stay as
    they are; a SyncBatchNorm keeps its group. `remove`, or the end of a `with` block,
    gives the module its own forward back.

    Args:
        module: which holds the layers.
        size: the most rows in a chunk of a batch that the module is called with.
        memory: `"device"`: one graph of all micro-batches, whose saved tensors wait on
            the host where the device is a GPU. `"flat"`: the module is split at its
            layers, and each segment runs once more in the backward pass, so that the
            device holds one micro-batch. A module that cannot be split, such as one
            with forward hooks within, runs in one graph; a warning says why.
            `"auto"`: `"device"` until memory runs out; `"flat"` on several ranks.
        process_group: of the ranks that share a window; default: all.
    """
    if not isinstance(module, nn.Module):
        raise TrainkitError(
            f"exact_batch_norm: must be given a torch module, received "
            f"{type(module).__name__}."
        )
    if size is not None:
        check_whole_number("exact_batch_norm size", size)
    return ExactBatchNorm(module, size, memory, process_group)
