"""Collating documents of any length into one row, without padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainkit.core.plan.options import check_kind, check_whole_number
from trainkit.core.split.partition import first_fit
from trainkit.data.padding import as_tensor, can_hold, columns_of
from trainkit.errors import TrainkitError


class PackCollate:
    """A `collate_fn` that puts documents one behind the other, for transformers.

    A sample is a mapping with `input_ids`, and `labels` if these are others, or a list
    of ids. A batch has

    - `input_ids`, `labels`, and each other field with an entry for each token, of shape
      (1, tokens); the first label of each document is ignored;
    - `position_ids`, which begin anew in each document, and `seq_idx`, its number;
    - `cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q`, `max_length_k`, for kernels that
      take rows of any length;
    - of any other field a tensor or a list, with an entry for each document.

    There is no `attention_mask`: beside one, transformers does not look at positions. A
    model of transformers must make no cache (`use_cache=False`), or documents see each
    other; the proof at the start of a run measures it.

    >>> batch = PackCollate()([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}])
    >>> batch["input_ids"].tolist(), batch["labels"].tolist()
    ([[5, 6, 7, 8, 9]], [[-100, 6, 7, -100, 9]])
    >>> batch["position_ids"].tolist(), batch["cu_seq_lens_q"].tolist()
    ([[0, 1, 2, 0, 1]], [0, 3, 5])

    Args:
        length: the number of tokens in a row, for compiled models. What is missing is
            filled by tokens without labels. More than fits in one row makes more rows,
            by first fit. Such a batch has no field whose size depends on the
            number of documents, so `seq_idx` and `position_ids` tell them apart.
        lengths: several such numbers: one row has the least that is enough, and several
            rows have the greatest.
        fill: the id of tokens that fill a row.
        ignore_index: the label that does not count.
    """

    def __init__(
        self,
        *,
        length: int | None = None,
        lengths: Sequence[int] | None = None,
        fill: int = 0,
        ignore_index: int = -100,
    ) -> None:
        if length is not None and lengths is not None:
            raise TrainkitError(
                f"PackCollate: length and lengths exclude each other, received "
                f"length={length!r} and lengths={lengths!r}. Leave one out."
            )
        several = lengths or [] if length is None else [length]
        what = "several, as (512, 1024); length= takes one"
        check_kind("PackCollate lengths", several, Sequence, what)
        for each in several:
            check_whole_number("PackCollate length", each)
        self.lengths = sorted(several)
        self.fill = fill
        self.ignore_index = ignore_index

    def __call__(self, samples: Sequence[Any]) -> dict[str, Any]:
        documents = [self._document(sample) for sample in samples]
        columns = columns_of("PackCollate", documents)
        own = [len(ids) for ids in columns["input_ids"]]
        tokens = [name for name in columns if _have_tokens(columns[name], own)]
        for labels in columns["labels"] if "labels" in tokens else ():
            labels[0] = self.ignore_index
        bins, length = self._bins(own)
        filled = {"input_ids": self.fill, "labels": self.ignore_index}
        batch: dict[str, Any] = {}
        for name, column in columns.items():
            rows = [[column[place] for place in places] for places in bins]
            if name in tokens:
                batch[name] = _joined(rows, length, filled.get(name, 0))
            else:
                batch[name] = _stacked(name, [value for row in rows for value in row])
        lengths = [[own[place] for place in places] for places in bins]
        positions = [[torch.arange(n) for n in row] for row in lengths]
        batch["position_ids"] = _joined(
            positions, length, 0
        )  # a model may know no more
        numbers = [
            torch.arange(len(row) + 1, dtype=torch.int32).repeat_interleave(
                torch.tensor([*row, length - sum(row)])
            )
            for row in lengths
        ]
        batch["seq_idx"] = torch.stack(numbers)
        return batch if self.lengths else batch | _offsets(own)

    def _bins(self, own: list[int]) -> tuple[list[list[int]], int]:
        """The documents of each row, and the length of the rows."""
        if not self.lengths:
            return [[*range(len(own))]], sum(own)
        if max(own) > self.lengths[-1]:
            raise TrainkitError(
                f"PackCollate length: a document must fit in a row of "
                f"{self.lengths[-1]} tokens, received one of {max(own)}. Cut it into "
                f"several documents in the data set, or choose a greater length."
            )
        bins = first_fit(own, self.lengths[-1])
        enough = (n for n in self.lengths if n >= sum(own))
        return bins, next(enough) if len(bins) == 1 else self.lengths[-1]

    def _document(self, sample: Any) -> dict[str, Any]:
        """The fields of a document, with tensors where there are numbers."""
        given = sample if isinstance(sample, Mapping) else {"input_ids": sample}
        if "input_ids" not in given:
            raise TrainkitError(
                f"PackCollate: every sample must have input_ids, received one with "
                f"{', '.join(map(repr, given))}. Rename its ids in the data set."
            )
        found = {n: as_tensor(v) for n, v in given.items() if n != "attention_mask"}
        document = {n: given[n] if t is None else t for n, t in found.items()}
        ids = document["input_ids"]
        if not isinstance(ids, Tensor) or ids.ndim != 1 or not len(ids):
            raise TrainkitError(
                f"PackCollate: input_ids must be a list of ids, and of one at least, "
                f"received {ids!r}. Leave empty documents out of the data set."
            )
        labels = document.get("labels", ids)
        if not isinstance(labels, Tensor) or not can_hold(
            labels.dtype, self.ignore_index
        ):
            kind = labels.dtype if isinstance(labels, Tensor) else type(labels).__name__
            raise TrainkitError(
                f"PackCollate: labels (without them, input_ids) must be numbers that "
                f"can be {self.ignore_index}, which is ignored, received {kind}. Give "
                f"the data set labels of int64."
            )
        return {**document, "labels": labels.clone()}


def _offsets(lengths: Sequence[int]) -> dict[str, Any]:
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    longest = max(lengths)
    return {
        "cu_seq_lens_q": offsets,
        "cu_seq_lens_k": offsets,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def _have_tokens(column: Sequence[Any], lengths: Sequence[int]) -> bool:
    """Whether a field has an entry for each token, in all documents."""
    return all(
        isinstance(value, Tensor) and value.ndim > 0 and len(value) == length
        for value, length in zip(column, lengths, strict=True)
    )


def _joined(rows: Sequence[Sequence[Tensor]], length: int, fill: float) -> Tensor:
    """The tokens of each row's documents, filled up to one length."""
    joined = [torch.cat(list(row)) for row in rows]
    missing = [(length - len(row), *row.shape[1:]) for row in joined]
    pairs = zip(joined, missing, strict=True)
    return torch.stack([torch.cat([row, row.new_full(n, fill)]) for row, n in pairs])


def _stacked(name: str, column: list[Any]) -> Any:
    """A field with an entry for each document: a tensor, or a list of other values."""
    if not all(isinstance(value, Tensor) for value in column):
        return column
    shapes = dict.fromkeys(tuple(value.shape) for value in column)
    if len(shapes) > 1:
        raise TrainkitError(
            f"PackCollate: {name} must have an entry for each token of every document, "
            f"or one shape in all, received {', '.join(map(str, shapes))}. Look at it "
            f"in the data set, or leave it out there."
        )
    return torch.stack(column)
