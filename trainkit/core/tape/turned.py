"""The check that rows do not see each other but in BatchNorm layers."""

from __future__ import annotations

import torch
from torch import Tensor

from trainkit.core.tape.call import Tape
from trainkit.core.tape.parts import Chunk
from trainkit.errors import TrainkitError


def refuse_mixing(tape: Tape, arguments: list[Tensor], name: str) -> None:
    """Refuse a module that gives rows other results in other company and other places.

    Some rows of the first chunk and of the last run once more, turned round, with the
    statistics known. What is drawn is left out, also from what they are compared with.

    Args:
        tape: of a call.
        arguments: of the call, those that were cut.
        name: of the module.
    """
    rows, first, last = tape.layout.rows, tape.layout.sizes[0], tape.layout.sizes[-1]
    heads, tails = list(range(first))[::-1], list(range(rows - last, rows))[::-1]
    pairs = [place for pair in zip(heads, tails, strict=False) for place in pair]
    places = [*pairs, *heads[last:]][:last]
    sources = [list(range(first)), list(range(rows - last, rows)), places]
    found = []
    for number, source in enumerate(sources):
        index = torch.tensor(source, device=arguments[0].device)
        given = [each.index_select(0, index) for each in arguments]
        found.append(_play(tape, given, is_small=number > 0))
    limit = max((torch.finfo(each).eps for each in _types(tape, found[0])), default=0.0)
    for (_, dim), head, tail, turned in zip(tape.outputs, *found, strict=True):
        if not (head.is_floating_point() or head.is_complex()):
            continue
        each = [_by_rows(head, dim, first), _by_rows(tail, dim, last)]
        both = torch.cat(each)
        known = [p if p < first else p - (rows - last) + first for p in places]
        wanted = both[known]
        apart = (_by_rows(turned, dim, last) - wanted).norm()
        if not apart <= limit**0.5 * wanted.norm():
            raise TrainkitError(
                f"exact BatchNorm: the rows of {name} see each other outside of "
                f"BatchNorm layers, or "
                f"their places count: turned round, and in other company, they give "
                f"other results (off by "
                f"{float(apart / wanted.norm()):.1e}). Do that outside of the module, "
                f"or give a module within to exact BatchNorm."
            )


def _by_rows(tensor: Tensor, dim: int, rows: int) -> Tensor:
    """A tensor with a dimension of rows in front."""
    return tensor.unflatten(dim, (rows, -1)).movedim(dim, 0).double()


def _types(tape: Tape, outputs: list[Tensor]) -> set[torch.dtype]:
    types = {each.dtype for each in outputs if each.is_floating_point()}
    for segment in tape.segments:
        for each in segment.operations:
            types |= {dtype for is_on, dtype in each.settings[1] if is_on}
    return types


def _play(tape: Tape, arguments: list[Tensor], *, is_small: bool) -> list[Tensor]:
    """The outputs of some rows, without what is drawn."""
    chunk = Chunk(dict(enumerate(arguments)), tape.fixed, is_small=is_small)
    wanted = {slot for slot, _ in tape.outputs}
    with torch.no_grad(), tape.surroundings.kept():
        states = tape.surroundings.random()
        for number, segment in enumerate(tape.segments):
            segment.run(0, chunk, tape.surroundings, draws="none")
            later = wanted.union(*(each.needed for each in tape.segments[number + 1 :]))
            for slot in chunk.values.keys() - later:
                del chunk.values[slot]
        tape.surroundings.set_random(states)
    return [chunk.values[slot] for slot, _ in tape.outputs]
