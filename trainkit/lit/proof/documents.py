"""Whether documents that share a row see each other, and where."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trainkit.core.document_fields import MASKS
from trainkit.core.documents import Documents, documents_option, find_documents
from trainkit.core.nested import take_apart
from trainkit.core.split.micro_batching import MicroBatching, is_inside
from trainkit.lit.proof.report import ALARM, SURELY_ROUNDING, Cause, Report
from trainkit.lit.proof.rows import FewRows
from trainkit.lit.proof.subject import Subject, in_first
from trainkit.lit.proof.taken import Event, first_unlike
from trainkit.lit.proof.words import cause

FEW = 3
"""So many documents share the row that is looked at, if there are so many."""

NOT_TOLD = (
    "{number} end-of-text tokens ({ends}) stand within rows, and nothing tells their "
    "documents apart: let the collate function add position_ids that begin anew, or "
    "name the field that tells them, documents='...'; documents='off' if each row is "
    "one text"
)


def of_documents(subject: Subject, precisions: Sequence[torch.dtype]) -> Report | None:
    """What is to be said of documents that see each other, or that nobody can tell
    apart; None where there is nothing.

    Args:
        subject: rows of the run.
        precisions: of the arithmetic, that first which is tried first.
    """
    batch = subject.rows.make(subject.all_rows)
    how = documents_option(subject.options, *subject.strategies.values())
    documents = find_documents(batch, how)
    if documents is None or len(documents.spans) == len(documents.numbers):
        is_told = how == "off" or documents is not None and documents.by not in MASKS
        ends = {end for each in subject.module.modules() for end in _end_of(each)}
        number = 0 if is_told else _ends_within(ends, batch)
        text = NOT_TOLD.format(number=number, ends=", ".join(map(str, sorted(ends))))
        return Report.of_nothing(text) if number else None
    chosen = _neighbours(documents)
    if not chosen:
        return None
    options = MicroBatching(size=1, documents=documents.by)
    rows = FewRows.cut_from(batch, options, subject.strategy, trims=True)
    # Documents have other numbers than rows, and so other draws.
    packed = replace(
        subject.varied(noted={}), rows=rows.again(rows.make(chosen)), options=None,
        has_batches=True, parts=[[place] for place in range(len(chosen))],
    )  # fmt: skip

    def apart(dtype: torch.dtype) -> tuple[Subject, bool]:
        used = packed.varied(dtype=dtype)
        return used, used.alone.least_off() <= SURELY_ROUNDING

    packed = in_first(precisions, apart)
    row, off, dtype = _Row(packed), packed.alone.least_off(), packed.rehearsal.dtype
    if off > ALARM[dtype]:
        found = row.cause()
    else:
        off, found = row.off_without_labels_across(), cause("label", end="end")
    of_loss = found.text == cause("loss over documents").text
    if off <= ALARM[dtype] or of_loss and is_inside(subject.options):
        return None  # a cut of the module leaves the loss as it is
    return Report(
        exact=False,
        deviation=off,
        rounding=packed.most_rounding,
        num_rows=len(chosen),
        precision=str(dtype).removeprefix("torch."),
        parts=(1,) * len(chosen),
        causes=(found,),
    )


def _neighbours(documents: Documents) -> list[int]:
    """The places of a few documents, side by side in a row, that have few tokens."""
    best: list[tuple[int, int, list[int]]] = []
    spans, lengths = documents.spans, documents.lengths
    for number, start in itertools.product((2, FEW), range(len(spans))):
        places = list(range(start, start + number))
        if places[-1] < len(spans) and spans[places[-1]].row == spans[start].row:
            tokens = sum(lengths[place] for place in places)
            best.append((-number, tokens, places))
    return min(best)[2] if best else []


def _ends_within(ends: set[int], batch: Any) -> int:
    """How many end-of-text tokens stand before others that count."""
    fields = dict(take_apart(batch)[0])
    ids = fields.get("input_ids")
    if not ends or not isinstance(ids, Tensor) or ids.ndim != 2:
        return 0
    after = torch.ones_like(ids, dtype=torch.bool)
    for name, nothing in (("labels", -100), ("attention_mask", 0)):
        field = fields.get(name)
        if isinstance(field, Tensor) and field.shape == ids.shape:
            after = field != nothing
            break
    is_end = torch.isin(ids, torch.tensor(sorted(ends), device=ids.device))
    return int((is_end[:, :-1] & after[:, 1:]).sum())


def _end_of(module: Any) -> Iterator[int]:
    """The end-of-text tokens of a model of transformers."""
    found = getattr(getattr(module, "config", None), "eos_token_id", None)
    for each in found if isinstance(found, list | tuple) else [found]:
        if isinstance(each, int):
            yield each


class _Row:
    """A few documents, which stand in one row.

    Args:
        subject: has no other rows; each document is a part.
    """

    def __init__(self, subject: Subject) -> None:
        self._subject, batch = subject, subject.rows.batch
        documents = find_documents(batch, documents_option(subject.rows.options))
        assert documents is not None
        self._by, self._spans = documents.by, documents.spans
        self._width = documents.numbers.shape[1]
        fields = take_apart(batch)[0]
        self._fields = {p: each for p, each in fields if isinstance(each, Tensor)}

    def cause(self) -> Cause:
        """Why documents are not what they are alone: content, then places, then a
        label. That they are not is certain."""
        try:
            if (place := self._content()) is not None:
                cached = self._is_exact_without_cache()
                return cause("a cache" if cached else "content", place)
            if (place := self._place()) is not None:
                return cause("place", place)
        except Exception:  # such as a forward that no hooks can watch
            return cause("content")
        starts = [span.start for span in self._spans[1:]]
        for path, value in self._fields.items():
            if "label" in path.lower() and value.shape[-1:] == (self._width,):
                counts = bool((value[..., starts] != -100).any())
                if counts:
                    return cause("label", end="start")
        return cause("loss over documents")

    def off_without_labels_across(self) -> float:
        """How far the row is from one without labels that are the first token of the
        next document; 0 if labels are not those of next tokens, or none is across."""
        ends = [span.stop - 1 for span in self._spans[:-1]]
        for path, labels in self._fields.items():
            if "label" not in path.lower() or not labels.ndim:
                continue
            counts = labels[..., :-1] >= 0
            if not counts.numel() or not bool(counts[..., ends].any()):
                continue
            alike = [e for e in self._fields.values() if e.shape == labels.shape]
            nexts = [counts & (labels[..., :-1] != ids[..., 1:]) for ids in alike]
            if not all(map(torch.any, nexts)):
                clean = labels.clone()
                clean[..., ends] = self._subject.rows.ignored
                with contextlib.suppress(Exception):  # the step refuses the change
                    whole = self._changed({path: clean}).as_one
                    return self._subject.as_one.off_from(whole)
        return 0.0

    def _changed(self, values: Mapping[str, Tensor]) -> Subject:
        """A row like this one, with other fields."""
        rows = self._subject.rows
        fields, build = take_apart(rows.batch)
        batch = build(iter([values.get(path, value) for path, value in fields]))
        return replace(self._subject, rows=rows.again(batch))

    def _content(self) -> str | None:
        """Where outputs of a document change with the ids of another."""
        whole = [_narrowed(each, self._width) for each in self._subject.events()]
        for changed in range(len(self._spans)):
            others = [*range(len(self._spans))]
            others.remove(changed)
            columns = [column for n in others for column in self._columns(n)]
            events = self._changed(self._exchanged(changed)).events()
            events = [_narrowed(each, self._width, columns) for each in events]
            event = first_unlike(whole, events, columns, self._width)
            if event is not None:
                return event.path
        return None

    def _place(self) -> str | None:
        """Where outputs of a document are not what they are alone."""
        whole = self._subject.events()
        for place in reversed(range(len(self._spans))):
            alone = self._subject.events([place])
            event = first_unlike(whole, alone, self._columns(place), self._width)
            if event is not None:
                return event.path
        return None

    def _columns(self, place: int) -> list[int]:
        return [*range(self._spans[place].start, self._spans[place].stop)]

    def _exchanged(self, place: int) -> dict[str, Tensor]:
        """The fields in which a document has what stands elsewhere in the row."""
        columns, found = torch.tensor(self._columns(place)), {}
        kept = (self._by.lower(), "label", "mask", "position", "seq_idx", "cu_")
        for path, value in self._fields.items():
            if not any(each in path.lower() for each in kept):
                for dim in [d for d, n in enumerate(value.shape) if n == self._width][
                    :1
                ]:
                    turned = value.flip(dim).index_select(dim, columns)
                    found[path] = value.index_copy(dim, columns, turned)
        return found

    def _is_exact_without_cache(self) -> bool:
        """Whether no document sees another once the model makes no cache."""
        configs = [getattr(m, "config", None) for m in self._subject.module.modules()]
        if not any(getattr(each, "use_cache", False) for each in configs):
            return False
        subject = self._subject.changed(_without_cache)
        return subject.alone.least_off() <= ALARM[subject.rehearsal.dtype]


def _without_cache(module: Any) -> None:
    for each in module.modules():
        config: Any = getattr(each, "config", None)
        if hasattr(config, "use_cache"):
            config.use_cache = False


def _narrowed(event: Event, width: int, columns: Sequence[int] = ()) -> Event:
    """An event without the values that are not as wide as the row, such as those of a
    document by itself; of all columns, or of some alone."""
    found = []
    for value in event.values:
        dim = next((d for d, size in enumerate(value.shape) if size == width), None)
        if dim is not None and columns:
            value = value.index_select(dim, torch.tensor(columns).to(value.device))
        found += [value] * (dim is not None)
    return replace(event, values=tuple(found))
