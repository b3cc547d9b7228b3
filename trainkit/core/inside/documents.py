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
    ROWS,
    TOKENS,
    Arguments,
    Axis,
    Chunk,
    Signature,
    Sizes,
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
        lengths: of the documents.
        whole: whether each argument is shared, as a user says.
        limit: the most tokens of a chunk, and documents; None if there is none.
    """

    lengths: list[int] = field(default_factory=list)
    whole: list[bool] = field(default_factory=list)
    limit: ByTokens | None = None

    def __post_init__(self) -> None:
        self.rows, lengths = len(self.lengths), torch.tensor(self.lengths)
        numbers = torch.arange(1, self.rows + 1).repeat_interleave(lengths)[None]
        found, rows = Documents(str(self.by), numbers, numbers), Rows(self.rows)
        self._layout = Flattened([], iter, (), rows, found, frozenset())
        self._ends = [*accumulate(self.lengths, initial=0)]
        pairs = zip(self.values, self.of_rows([0], self.values), strict=True)
        self.axes = [() if made is x else (self._axis(x),) for x, made in pairs]

    def _axis(self, value: Any) -> Axis:
        """Of what is cut: its tokens, or an entry for each document."""
        is_tensor = isinstance(value, Tensor)
        dim = self._layout.dim_of_tokens(value) if is_tensor else None
        return Axis(0) if dim is None else Axis(dim, TOKENS)

    def of_rows(self, rows: Sequence[int], values: Sequence[Any]) -> list[Any]:
        three = list(zip(self.paths, values, self.whole, strict=True))
        fields = [Field(path, value) for path, value, whole in three if not whole]
        made = iter(replace(self._layout, fields=fields).values(rows))
        return [value if whole else next(made) for _, value, whole in three]

    def of(self, chunk: Chunk, values: Sequence[Any]) -> list[Any]:
        return self.of_rows(range(chunk.start, chunk.stop), values)

    def few(self, rows: Sequence[int]) -> Arguments:
        # What is not cut keeps its length, also where that is theirs by chance.
        three = zip(self.values, self.axes, self.whole, strict=True)
        whole = [w or not (axes or isinstance(v, int)) for v, axes, w in three]
        lengths = [self.lengths[row] for row in rows]
        return replace(self, values=self.taken(rows), lengths=lengths, whole=whole)

    def places(self, rows: Sequence[int], unit: int) -> Sequence[int]:
        if unit == ROWS:
            return rows
        return [n for r in rows for n in range(self._ends[r], self._ends[r + 1])]

    def counts(self, rows: Sequence[int]) -> dict[int, int]:
        return {TOKENS: sum(self.lengths[row] for row in rows), ROWS: len(rows)}

    def chunk(self, start: int, stop: int) -> Chunk:
        return Chunk((start, stop), (self._ends[start], self._ends[stop]))

    def chunks(self, sizes: Sizes) -> list[Chunk]:
        if (limit := self.limit) is None:
            return [self.chunk(*run) for run in sizes.runs(self.rows)]
        parts = filled_up(range(self.rows), lambda p: limit.allows(self.counts(p)))
        return [self.chunk(part[0], part[-1] + 1) for part in parts]


def by_documents(
    arguments: Arguments,
    signature: Signature,
    how: str,
    limit: ByTokens | None,
    name: str,
) -> Arguments:
    """The arguments of a call as those of its documents; as they are, if nothing among
    them tells documents of one row apart.

    Args:
        arguments: of the call.
        signature: says which of them are shared.
        how: what tells documents apart, as in `find_documents`; the path in a loader
            batch, of which the last part may be the name of an argument.
        limit: the most tokens and documents of a chunk; None if there is none.
        name: of the module, for messages.
    """
    paths, values = arguments.paths, arguments.values
    whole = [signature.is_shared(path) for path in paths]
    if how not in ("auto", "off"):
        names = how, how.rpartition(".")[2]
        how = next((path for path in names if path in paths), "off")
    given = [None if w else v for v, w in zip(values, whole, strict=True)]
    build = arguments.build or (lambda given: dict(zip(paths, given, strict=True)))
    found = find_flattened(build(iter(given)), how)
    if found is None or len(found.begun) > 1:
        return arguments
    is_mask = how == "auto" and found.by.rpartition(".")[2] in MASKS
    if is_mask and values[paths.index(found.by)].ndim == 1:
        return arguments  # such as the lengths of rows
    # What has begun may be padding: it runs as one more document.
    lengths = replace(found, numbers=found.begun).lengths
    sizes = limit and limit.sizes(max(lengths), len(lengths))
    own = {**vars(arguments), "by": found.by, "sizes": sizes}
    ends = [*accumulate(lengths, initial=0)]
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
    return OfDocuments(**own, lengths=lengths, whole=whole, limit=limit)
