"""A cut module whose inner parts FSDP2 shards each for itself.

Autograd cannot name the whole weights of such parts from outside: they come and go. So
each chunk has a backward pass of its own, of which FSDP2 keeps the gradients and
reduces them with the call's last chunk. The first two calls need room for all weights
of the parts at once: while the rows are looked at, ranks must not wait for each other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    FlatParameter,
    FSDPModule,
    FullyShardedDataParallel,
)

from trainkit.core._compat import (
    gathered,
    nested_pass,
    ranks_of_shards,
    shared_units,
)
from trainkit.core.batch_norm.layers import listed
from trainkit.core.inside.chunks import Chunk, Sizes
from trainkit.core.inside.keep import Keep
from trainkit.core.split.partition import even_runs
from trainkit.errors import TrainkitError


class FixedNumber(Sizes):
    """As many chunks as all ranks have.

    Args:
        number: of chunks.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self._number = number

    def cut(self, start: int, stop: int) -> list[Chunk]:
        runs = even_runs(stop - start, self._number)
        return [Chunk(start + first, start + behind) for first, behind in runs]


class Shards:
    """The parts within a cut module that FSDP2 shards, whose ranks do all alike.

    Args:
        parts: the modules that were given to `fully_shard`.
        name: of the cut module, for messages.

    Attributes:
        own: the ids of the parameters that FSDP2 takes care of.
    """

    def __init__(self, parts: Sequence[nn.Module], name: str) -> None:
        self._parts, self._name = parts, name
        self.own = {id(p) for part in parts for p in part.parameters()}
        self.trains = any(p.requires_grad for part in parts for p in part.parameters())
        ranks = [found for part in parts if (found := ranks_of_shards(part))]
        self._group, self._device = ranks[0]

    def agreed(self, sizes: Sizes, rows: int, *, probes: bool) -> tuple[int, bool]:
        """How many chunks all ranks have, and whether any of them probes its rows.

        Every rank must call it, as often as the others.
        """
        if sizes.is_auto or sizes.limit is None:
            raise TrainkitError(
                f"{self._name}: parts of it are sharded by FSDP2, whose ranks need "
                f"equally many chunks, and with size=None each rank finds its own. "
                f"Give a size."
            )
        number = max(1, -(-rows // sizes.limit))
        most, fewest, any_probes = self._most(number, -rows, int(probes))
        if most > 1 and most > -fewest:
            raise TrainkitError(
                f"{self._name}: parts of it are sharded by FSDP2, whose ranks need "
                f"equally many chunks: one rank needs {most}, and another has "
                f"{-fewest} rows. Give the ranks batches of like size, or a larger "
                f"size."
            )
        return most, bool(any_probes)

    @contextlib.contextmanager
    def probing(self) -> Iterator[None]:
        """Within it the module runs without messages; a failure is one of all ranks."""
        failure: Exception | None = None
        with gathered(self._parts):
            try:
                yield
            except Exception as error:
                failure = error
        (failed,) = self._most(int(failure is not None))
        if failure is not None:
            raise failure
        if failed:
            raise TrainkitError(
                f"{self._name}: another rank refused to run it in chunks. See there."
            )

    def chunk(self, *, is_last: bool) -> contextlib.AbstractContextManager[None]:
        """Within it a chunk runs again and has its own backward pass."""
        return nested_pass(self._parts, reduces=is_last)

    def _most(self, *numbers: int) -> list[int]:
        found = torch.tensor(numbers, device=self._device)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group)
        return found.tolist()


def shards_within(module: nn.Module, name: str, keep: Keep) -> Shards | None:
    """What FSDP2 shards strictly within a module; None if there is nothing.

    Args:
        module: which is cut.
        name: of it, for messages.
        keep: how many chunks are to keep their graph.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    within = [each for each in module.modules() if each is not module]
    parts = [each for each in within if isinstance(each, FSDPModule)]
    if not any(ranks_of_shards(part) for part in parts):
        return None
    if beyond := shared_units(parts) - set(within):
        raise TrainkitError(
            f"{name}: FSDP2 gathers parts of it together with modules that are not "
            f"within it: {listed([type(each).__name__ for each in beyond])}. Call "
            f"fully_shard on each by itself, or name a module around all of them."
        )
    if isinstance(keep, int) and keep:
        raise TrainkitError(
            f"{name}: parts of it are sharded by FSDP2, which frees their weights, so "
            f"that no chunk can keep its graph, and keep={keep} was given. Write "
            f"keep=0."
        )
    return Shards(parts, name)


@contextlib.contextmanager
def replaced_parameters(
    module: nn.Module, others: Sequence[tuple[Tensor, Tensor]]
) -> Iterator[None]:
    """A module with other tensors in place of some of its parameters, for a while.

    Args:
        module: whose parameters they are.
        others: pairs of a parameter and what takes its place.
    """
    by_id = {id(parameter): other for parameter, other in others}
    held = [
        (each._parameters, name, parameter)
        for each in module.modules()
        for name, parameter in each._parameters.items()
        if id(parameter) in by_id
    ]
    try:
        for place, name, parameter in held:
            place[name] = by_id[id(parameter)]  # type: ignore[assignment]
        _renew_lists(module)
        yield
    finally:
        for place, name, parameter in held:
            place[name] = parameter
        _renew_lists(module)


def _renew_lists(module: nn.Module) -> None:
    """Recurrent layers hold their weights in a list as well."""
    for each in module.modules():
        if isinstance(each, nn.RNNBase):
            each._flat_weights = [
                each._parameters[name] for name in each._flat_weights_names
            ]


def pulled(
    outputs: Sequence[Tensor], given: Sequence[Tensor], sources: Sequence[Tensor]
) -> list[Tensor | None]:
    """The gradients of leaves, by a backward pass that fills all other leaves too."""
    torch.autograd.backward(outputs, given)
    return [each.grad for each in sources]


def refuse_flat(module: nn.Module, name: str, leaves: Sequence[Tensor] = ()) -> None:
    """Refuse a module in, of, or around which there is the first FSDP.

    Args:
        module: which is cut.
        name: of it, for messages.
        leaves: of its outputs' graph.
    """
    has_wrapper = any(isinstance(m, FullyShardedDataParallel) for m in module.modules())
    if has_wrapper or any(
        isinstance(each, FlatParameter) for each in [*module.parameters(), *leaves]
    ):
        raise TrainkitError(
            f"{name}: FullyShardedDataParallel flattens weights and frees them after "
            f"each forward pass, so that chunks get no gradient. Shard by "
            f"torch.distributed.fsdp.fully_shard (FSDP2; ModelParallelStrategy in "
            f"Lightning), or use DDP."
        )
