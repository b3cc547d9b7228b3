"""Whether rows stand alone: small runs of the calls 1, 2, 4, 8, ... of each kind.

The outputs of chunks are compared with those of larger groups of rows, which come from
all chunks: so a row's place, the number of rows and the rows beside it differ at once.
The gradient of a few rows is compared with that of their halves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainkit.core.inside.chunks import Chunk, Sizes
from trainkit.core.inside.closeness import are_close
from trainkit.core.inside.cut import Cut
from trainkit.core.inside.graphs import has_mixed_gradients, refuse_what_is_left
from trainkit.core.inside.moment import Moment, settings_of
from trainkit.core.inside.outputs import Joined, Plan, Unfit, plan_of, rows_of
from trainkit.core.inside.rows import Arguments
from trainkit.core.inside.shadows import refuse_shards
from trainkit.core.inside.trial import Trial, looking
from trainkit.core.out_of_memory import is_out_of_memory, release

MOST_KINDS = 99
"""How many kinds of calls are remembered."""


class Checks:
    """Knows how each kind of call is joined, and when it is to be looked at.

    Args:
        cut: which is called.
    """

    def __init__(self, cut: Cut) -> None:
        self._cut = cut
        self._kinds: dict[Any, tuple[Plan, int]] = {}

    def find(self, arguments: Arguments, sizes: Sizes) -> tuple[Plan, bool]:
        """How a call is joined, and whether it was looked at now.

        Args:
            arguments: of the call.
            sizes: of the chunks that are looked at.
        """
        key = self._key(arguments)
        plan, times = self._kinds.get(key, (None, 0))
        number = times + 1
        is_looked_at = plan is None or not number & (number - 1)
        if plan is None or is_looked_at:
            plan = self.look(arguments, sizes)
            if len(self._kinds) >= MOST_KINDS:
                self._kinds.clear()
        self._kinds[key] = plan, number
        return plan, is_looked_at

    def look(self, arguments: Arguments, sizes: Sizes) -> Plan:
        """Refuse a call whose rows do not stand alone; else, how it is joined."""
        cut = self._cut
        moment = Moment(cut.module, cut.name, arguments.devices)
        sums = moment.sums()
        refuse_shards(cut.module, cut.name)
        while True:
            try:
                with looking(cut, arguments, moment) as trial:
                    plan = _plan(trial, sizes)
                moment.check_sums(sums)
                return plan
            except Exception as error:
                if not is_out_of_memory(error) or not sizes.halve(arguments.rows):
                    raise
                release(error)

    def _key(self, arguments: Arguments) -> Any:
        """What a call has in common with others of its kind: modes and flags, what
        trains, and which arguments have rows."""
        settings = settings_of(self._cut.module).values()
        values = zip(arguments.paths, arguments.values, arguments.cut, strict=True)
        return (
            torch.is_grad_enabled(),
            *[each for each in settings if isinstance(each, bool | str)],
            *[each.requires_grad for each in self._cut.module.parameters()],
            *[
                (path, is_cut, value.ndim if isinstance(value, Tensor) else type(value))
                for path, value, is_cut in values
            ],
        )


def _plan(trial: Trial, sizes: Sizes) -> Plan:
    """How the outputs are joined, if no row depends on another."""
    rows = trial.arguments.rows
    if rows <= 1:
        raise Unfit("none of its arguments has rows")
    chunks = sizes.cut(rows)
    size = chunks[0].num_rows
    if trial.has_graph:
        refuse_what_is_left(trial, size)  # first, or a cache is made without a graph
    # The capacity of experts shows in more rows than a chunk has, if they fit.
    is_full = sizes.is_auto or size == rows
    number = -(-size // 2) if is_full and size > 1 else min(2 * size, rows)
    groups = _groups(rows, number)
    picked = groups[0]
    plan = plan_of(trial.run(picked), trial.run(range(size)), len(picked), size)
    if trial.has_drawn and not _can_evaluate(trial, picked, plan):
        return plan
    is_mixed = trial.has_graph and has_mixed_gradients(
        trial, plan, size if sizes.is_auto else max(size, 2)
    )
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
    change. Else only the rows beside it do."""
    trial.evaluates = True
    try:
        found = trial.run(picked)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return False  # it has no other mode
    if not trial.has_drawn:
        return len(found) == len(plan)
    trial.evaluates, at = False, len(picked) // 2
    found, alone = trial.run(picked), trial.run([picked[at]] * len(picked))
    for joint, one, other in zip(plan, found, alone, strict=True):
        if joint.dim is not None:
            pair = [rows_of(each.value, joint, [at]) for each in (one, other)]
            if not are_close(*pair, eps=trial.eps):
                raise Unfit(f"{joint.name} of a row depends on other rows")
    return False


def _compare(
    trial: Trial, groups: Sequence[list[int]], plan: Plan, chunks: Sequence[Chunk]
) -> None:
    """Refuse outputs of chunks that are not those of their rows beside others."""
    arguments = trial.arguments
    joined = Joined(plan, arguments.rows, trial.cut.name)
    for chunk in chunks:
        fields = trial.run(range(chunk.start, chunk.stop))
        joined.add(chunk, [each.value for each in fields])
    for rows in groups:
        found = trial.run(rows)
        for index, (joint, whole) in enumerate(zip(plan, joined.values, strict=True)):
            if joint.dim is None:
                continue
            own, value = rows_of(whole, joint, rows), found[index].value
            if are_close(own, value, eps=trial.eps):
                continue
            if not are_close(value, trial.run(rows)[index].value, eps=trial.eps):
                raise Unfit(
                    f"{joint.name} is another one each time it runs. It draws from "
                    f"a generator of its own, or counts its runs: draw from "
                    f"torch's generator"
                )
            raise Unfit(
                f"{joint.name} of a row depends on other rows, on its place among "
                f"them, or on how many there are"
            )


def _groups(rows: int, most: int) -> list[list[int]]:
    """All rows in groups of at most so many, with no two neighbours side by side.

    >>> _groups(8, 4)
    [[6, 2, 4, 0], [7, 3, 5, 1]]
    """
    number = -(-rows // most)
    spread = [list(range(rows))[first::number] for first in range(number)]
    return [[*each[::-2], *each[-2::-2]] for each in spread]
