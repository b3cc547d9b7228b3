"""Whether rows stand alone: small runs of the calls 1, 2, 4, 8, ... of each kind.

The outputs of chunks are compared with those of larger groups of rows, which come from
all chunks: so a row's place, the number of rows and the rows beside it differ at once.
Where chunks leave out columns that are padding, the groups have them. The gradient of a
few rows is compared with that of their halves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from trainkit.core.batch_norm.layers import listed, normalising_by_batch
from trainkit.core.generators import States
from trainkit.core.inside.chunks import Chunk, Sizes
from trainkit.core.inside.closeness import are_close
from trainkit.core.inside.cut import Cut
from trainkit.core.inside.moment import Moment, put_back, settings_of
from trainkit.core.inside.outputs import (
    Joined,
    Joint,
    Plan,
    Unfit,
    plan_of,
    rows_of,
    with_columns,
)
from trainkit.core.inside.refusals import OF_ROWS, refuse_parts, refusing
from trainkit.core.inside.rows import Arguments, ByLength
from trainkit.core.inside.trial import Trial
from trainkit.core.out_of_memory import in_smaller_parts, is_out_of_memory
from trainkit.errors import TrainkitError


def look(cut: Cut, arguments: Arguments, sizes: Sizes, moment: Moment) -> Plan:
    """Refuse a call whose rows do not stand alone; else, how it is joined.

    Args:
        cut: which is called.
        arguments: of the call.
        sizes: of the chunks that are looked at.
        moment: what the module was like before.
    """
    if found := normalising_by_batch(cut.module):
        names = [each or "the module itself" for each in found]
        raise TrainkitError(
            f"{cut.name}: its rows must not see each other, and BatchNorm normalises "
            f"by all rows of a batch: {listed(names)}. Freeze it, use "
            f'BatchNormGuard("exact"), or name a module without it.'
        )
    refuse_parts(cut.module, cut.name, OF_ROWS)
    sums, begun = moment.sums(), States(arguments.devices)

    def put_all_back() -> None:
        begun.put_back()
        put_back(cut.module, moment.settings)
        if torch.is_autocast_cache_enabled():
            torch.clear_autocast_cache()

    def run() -> Plan:
        trial = Trial(cut, arguments, moment)
        with refusing(cut.module, cut.name, arguments, moment):
            plan = _plan(trial, sizes)
        moment.check_state(sums)
        return plan

    try:
        return in_smaller_parts(run, lambda: sizes.halve(arguments.rows), put_all_back)
    finally:
        put_all_back()


def _plan(trial: Trial, sizes: Sizes) -> Plan:
    """How the outputs are joined, if no row depends on another."""
    rows, by_length = trial.arguments.rows, trial.arguments.by_length
    if rows <= 1:
        raise Unfit("none of its arguments has rows")
    chunks = by_length.chunks if by_length else sizes.cut(rows)
    size = sizes.cut(rows)[0].stop
    if trial.has_graph:
        # First, or a cache is made without a graph.
        trial.refuse_what_is_left(range(min(size, 2)))
    # The capacity of experts shows in more rows than a chunk has, if they fit.
    is_full = sizes.is_auto or size == rows
    number = -(-size // 2) if is_full and size > 1 else min(2 * size, rows)
    groups = _groups(rows, number)
    picked = groups[0]
    some, others = trial.fields(picked), trial.run(range(size))
    plan = plan_of(some, others, len(picked), size)
    is_trimmed = False
    for chunk in chunks[::-1]:
        if by_length and not is_trimmed and chunk.columns != (0, by_length.width):
            chunk = replace(chunk, stop=min(chunk.start + 2, chunk.stop))
            few = range(chunk.start, chunk.stop)
            plan = with_columns(plan, trial.run(few), trial.run(chunk))
            is_trimmed = True
    if trial.has_drawn and not _can_evaluate(trial, picked, plan):
        if is_trimmed:
            raise Unfit(
                "it draws random numbers in evaluation mode too, so that it cannot be "
                "seen whether a row depends on the columns that are padding. Cut by "
                "size= alone"
            )
        return plan
    few = size if sizes.is_auto else max(size, 2)
    is_mixed = trial.has_graph and trial.has_mixed_gradients(plan, few)
    _compare(trial, groups, plan, chunks)
    if is_mixed:
        raise Unfit(
            "the gradient of rows at once is not the sum of their gradients in "
            "chunks, though their outputs are alike. A hook or a backward pass of "
            "its own looks at all rows; or an argument as long as the batch has "
            "no rows, and belongs in shared="
        )
    return plan


def _can_evaluate(trial: Trial, picked: Sequence[int], plan: Plan) -> bool:
    """Whether rows run without draws in evaluation mode, so that a row's place may
    change; in that mode it stays. Else only the rows beside it do."""
    settings = settings_of(trial.cut.module)
    for each in trial.cut.module.modules():
        each.training = False
    try:
        found = trial.run(picked)
        if not trial.has_drawn:
            return len(found) == len(plan)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return False  # it has no other mode
    put_back(trial.cut.module, settings)
    at = len(picked) // 2
    found, alone = trial.run(picked), trial.run([picked[at]] * len(picked))
    for joint, one, other in zip(plan, found, alone, strict=True):
        if joint.dim is not None:
            pair = [rows_of(each, joint, [at]) for each in (one, other)]
            if not are_close(*pair, eps=trial.eps):
                raise Unfit(f"{joint.name} of a row depends on other rows")
    return False


def _compare(
    trial: Trial, groups: Sequence[list[int]], plan: Plan, chunks: Sequence[Chunk]
) -> None:
    """Refuse outputs of chunks that are not those of their rows beside others."""
    arguments, by_length = trial.arguments, trial.arguments.by_length
    width = by_length.width if by_length else 0
    joined = Joined(plan, arguments.rows, trial.cut.name, width)
    for chunk in chunks:
        rows = chunk if by_length else range(chunk.start, chunk.stop)
        joined.add(chunk, trial.run(rows))
    for rows in groups:
        found = trial.run(rows)
        for index, (joint, whole) in enumerate(zip(plan, joined.values, strict=True)):
            if joint.dim is None:
                continue
            own, value = rows_of(whole, joint, rows), found[index]
            if by_length and joint.padded:
                marks = _marks(own, by_length, joint, rows)
                own, value = own * marks, value * marks
            if are_close(own, value, eps=trial.eps):
                continue
            again = trial.run(rows)[index]
            if not are_close(found[index], again, eps=trial.eps):
                raise Unfit(
                    f"{joint.name} is another one each time it runs. It draws from "
                    f"a generator of its own, or counts its runs: draw from "
                    f"torch's generator"
                )
            columns = ", or on the columns that are padding" if by_length else ""
            raise Unfit(
                f"{joint.name} of a row depends on other rows, on its place among "
                f"them, or on how many there are{columns}"
            )


def _marks(
    value: Tensor, by_length: ByLength, joint: Joint, rows: Sequence[int]
) -> Tensor:
    """1 where an output of some rows is no padding."""
    spans = torch.tensor([by_length.spans[row] for row in rows], device=value.device)
    columns = torch.arange(by_length.width, device=value.device)
    marks = (columns >= spans[:, :1]) & (columns < spans[:, 1:])
    marks = marks.repeat_interleave(joint.multiple, 0)
    shape = [1] * value.ndim
    assert joint.dim is not None
    shape[joint.dim], shape[joint.padded[0]] = marks.shape
    return (marks if joint.dim < joint.padded[0] else marks.T).reshape(shape)


def _groups(rows: int, most: int) -> list[list[int]]:
    """All rows in groups of at most so many, with no two neighbours side by side.

    >>> _groups(8, 4)
    [[6, 2, 4, 0], [7, 3, 5, 1]]
    """
    number = -(-rows // most)
    spread = [list(range(rows))[first::number] for first in range(number)]
    return [[*each[::-2], *each[-2::-2]] for each in spread]
