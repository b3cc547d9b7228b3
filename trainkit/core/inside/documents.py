"""Calls whose rows are documents that stand one behind the other in one row.

What tells them apart is found as in a loader batch that is cut between them, and the
arguments of a chunk are made as those of a micro-batch are: offsets and numbers anew. A
chunk has neighbours, in their order, so that what it returns is a part of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from trainkit.core.document_fields import MASKS, OFFSETS, are_offsets
from trainkit.core.documents import Documents, find_flattened
from trainkit.core.inside.rows import (
    TOKENS,
    Arguments,
    Axis,
    Chunk,
    runs_of,
)
from trainkit.core.inside.tokens import ByTokens
from trainkit.core.nested import Field
from trainkit.core.split.flattening import Flattened
from trainkit.core.split.partition import filled_up
from trainkit.core.split.rows import Rows
from trainkit.errors import TrainkitError


@dataclass
class OfDocuments(Arguments):
    """The arguments of a call whose rows are documents.

    Attributes:
        runs: the tokens of each document.
    """

    runs: list[range] = field(default_factory=list)

    def __post_init__(self) -> None:
        lengths = torch.tensor([*map(len, self.runs)])
        numbers = torch.arange(1, self.rows + 1).repeat_interleave(lengths)[None]
        found, rows = Documents(str(self.by), numbers, numbers), Rows(self.rows)
        self._layout = Flattened([], iter, (), rows, found, frozenset())
        pairs = zip(self.values, self.of(self.chunk([0]), self.values), strict=True)
        self.axes = [() if made is x else (self._axis(x),) for x, made in pairs]

    def _axis(self, value: Any) -> Axis:
        """Of what is cut: its tokens, or an entry for each document."""
        is_tensor = isinstance(value, Tensor)
        dim = self._layout.dim_of_tokens(value) if is_tensor else None
        return Axis(0) if dim is None else Axis(dim, TOKENS)

    def chunk(self, rows: Sequence[int]) -> Chunk:
        if isinstance(rows, range):
            tokens = range(self.runs[rows[0]].start, self.runs[rows[-1]].stop)
            return Chunk((rows, tokens, ()), self.totals)
        several = [token for row in rows for token in self.runs[row]]
        return Chunk((rows, several, ()), self.totals)

    def of(self, chunk: Chunk, values: Sequence[Any]) -> list[Any]:
        three = list(zip(self.paths, values, self.whole, strict=True))
        fields = [Field(path, value) for path, value, whole in three if not whole]
        made = iter(replace(self._layout, fields=fields).values(chunk.rows))
        return [value if whole else next(made) for _, value, whole in three]


def by_documents(
    arguments: Arguments,
    how: str,
    limit: ByTokens | None,
    name: str,
) -> Arguments:
    """The arguments of a call as those of its documents; as they are, if nothing among
    them tells documents of one row apart.

    Args:
        arguments: of the call.
        how: what tells documents apart, as in `find_documents`; the path in a loader
            batch, of which the last part may be the name of an argument.
        limit: the most tokens and documents of a chunk; None if there is none.
        name: of the module, for messages.
    """
    paths, values = arguments.paths, arguments.values
    if how not in ("auto", "off"):
        names = how, how.rpartition(".")[2]
        how = next((path for path in names if path in paths), "off")
    pairs = zip(values, arguments.whole, strict=True)
    given = [None if is_whole else value for value, is_whole in pairs]
    build = arguments.build or (lambda given: dict(zip(paths, given, strict=True)))
    found = find_flattened(build(iter(given)), how)
    if found is None or len(found.begun) > 1:
        return arguments
    is_mask = how == "auto" and found.by.rpartition(".")[2] in MASKS
    if is_mask and values[paths.index(found.by)].ndim == 1:
        return arguments  # such as the lengths of rows
    # What has begun may be padding: it runs as one more document.
    lengths = replace(found, numbers=found.begun).lengths
    runs, ends = runs_of(lengths), [*accumulate(lengths, initial=0)]
    for path, value in zip(paths, values, strict=True):
        told = path == found.by or path.rpartition(".")[2] in OFFSETS
        if told and isinstance(value, Tensor) and are_offsets(value, ends[-1]):
            if value.flatten().tolist() != ends:
                raise TrainkitError(
                    f"{name}: its documents are told apart by {found.by}, so the "
                    f"offsets {path} must begin at 0, name where each ends, and end at "
                    f"the number of tokens, {ends[-1]}. Name padding as a document, "
                    f"leave out empty ones, or say documents='off'."
                )
    of_documents = {
        "totals": (len(runs), ends[-1], 0),
        "sizes": limit and limit.sizes(max(lengths), len(runs)),
        "by": found.by,
    }
    own = {**vars(arguments), **of_documents}
    made = OfDocuments(**own, runs=runs)
    if limit is not None:
        tokens = lambda rows: ends[rows[-1] + 1] - ends[rows[0]]  # noqa: E731
        allows = lambda rows: limit.allows(len(rows), tokens(rows))  # noqa: E731
        groups = filled_up(range(len(runs)), allows)
        made.parts = [made.chunk(range(each[0], each[-1] + 1)) for each in groups]
    return made
