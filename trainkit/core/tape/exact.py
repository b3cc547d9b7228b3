"""Exact BatchNorm for any loop."""

from __future__ import annotations

from typing import Any

from torch import nn

from trainkit.core.in_place_of import InPlaceOf, check_cut
from trainkit.core.inside.chunks import Sizes
from trainkit.core.ranks import find_ranks
from trainkit.core.tape.forward import TapedForward


class ExactBatchNorm(InPlaceOf):
    """A module whose BatchNorm layers are normalised by the whole batch.

    `exact_batch_norm` makes it. It has the module's parameters under their own names,
    and can be called in its place.
    """


def exact_batch_norm(
    module: nn.Module, *, size: int, process_group: Any = None
) -> ExactBatchNorm:
    """Let the BatchNorm layers of a module see the whole batch, in any loop.

    The module runs in chunks of rows. Each layer is normalised by the mean and variance
    of all rows, on all ranks; its running statistics move once; the gradient is the big
    batch's.

        net = exact_batch_norm(net, size=8)
        loss = any_loss(net(batch), labels)
        loss.backward()

    The forward of the module runs once, on the first chunk, and the others repeat its
    operations: so it may see of a value no more than its shape, type and device. What
    cannot be repeated is refused. Layers in evaluation mode stay as they are; a
    SyncBatchNorm keeps its group. `remove`, or the end of a `with` block, gives the
    module its own forward back.

    Args:
        module: which holds the layers.
        size: the most rows in a chunk.
        process_group: of the ranks that share a batch; default: all.
    """
    check_cut("exact_batch_norm", module, size)
    ranks = find_ranks(None, "none", process_group)
    return ExactBatchNorm(module, TapedForward(module, Sizes(size), ranks))
