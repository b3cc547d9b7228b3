"""The comparison of a forward in segments with the module itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from trainkit.core.batch_norm.layers import listed
from trainkit.core.inside.closeness import are_close
from trainkit.core.inside.moment import version_of
from trainkit.core.joins.left import Left
from trainkit.core.joins.net import Net
from trainkit.core.joins.program import Program, Untraceable
from trainkit.core.joins.replay import Replay
from trainkit.core.joins.statistics import Normal
from trainkit.core.out_of_memory import is_out_of_memory, release


def prove(
    net: Net,
    program: Program,
    normals: Sequence[Normal],
    put_back: Sequence[Callable[[], None]],
    values: Sequence[Any],
    outputs: Sequence[Any],
) -> None:
    """Compare the outputs of a micro-batch with the module's own, by the same
    statistics and draws.

    Args:
        net: which was called.
        program: its forward in segments.
        normals: normalise in place of its layers.
        put_back: restore the random states of the micro-batch's segments.
        values: its arguments.
        outputs: the leaves of its output.

    Raises:
        Untraceable: they are others, or the module does what segments do not.
    """
    net.switched(0)  # its attributes are there now
    left = Left(net.module)
    ends = [each.end for each in program.segments if each.end is not None]

    def run(*, saves: bool) -> list[Any]:
        copies = [_copy(value) for value in values]
        versions = [version_of(x) for x in copies if isinstance(x, Tensor)]
        found = Replay(ends, normals, put_back).run(net, copies, saves=saves)
        if versions != [version_of(x) for x in copies if isinstance(x, Tensor)]:
            raise Untraceable("it changes an argument in place")
        return found

    try:
        found = run(saves=False)
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        release(error)
        found = run(saves=True)
    for one, other in zip(outputs, found, strict=True):
        if isinstance(one, Tensor) and not are_close(one, other):
            raise Untraceable("as it was traced, its outputs are others")
    if names := left.since():
        raise Untraceable(f"its forward leaves tensors in {listed(names)}")
    program.is_proven = True


def _copy(value: Any) -> Any:
    """An argument that the module may change."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().requires_grad_(value.requires_grad).clone()
