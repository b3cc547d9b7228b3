"""Whether documents that share a row see each other, and where."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trainkit.core.document_fields import MASKS
from trainkit.core.documents import Documents, documents_option, find_documents
from trainkit.core.nested import take_apart, with_tensors
from trainkit.core.split.micro_batching import MicroBatching
from trainkit.core.terms import leading
from trainkit.lit.proof.places import Event, alike, record_events
from trainkit.lit.proof.report import Cause, Cut, Report
from trainkit.lit.proof.rows import FewRows
from trainkit.lit.proof.subject import Subject, in_arithmetic
from trainkit.lit.proof.verdict import ALARM
from trainkit.lit.proof.weights import Alone
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
    batch = subject.batch(subject.all_rows)
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
    own = leading(subject.strategies) if subject.strategies else None
    rows = FewRows(batch, MicroBatching(size=1, documents=documents.by), own)
    row, found = rows.of(rows.make(chosen)), None
    packed, off, _ = in_arithmetic(
        _each_alone(subject, row),
        precisions,
        lambda used: (Alone(used).least_off(), ()),
    )
    dtype = packed.rehearsal.dtype
    if off <= ALARM[dtype]:
        clean = _without_labels_across(row, documents.by)
        off = 0.0 if clean is None else _off_from(packed, clean)
        if off <= ALARM[dtype]:
            return None
        found = cause("last label")
    return Report(
        exact=False,
        deviation=off,
        rounding=packed.most_rounding,
        num_rows=len(chosen),
        precision=str(dtype).removeprefix("torch."),
        cuts=(Cut("each document alone", (1,) * len(chosen), off),),
        causes=(found or _cause_of(packed, documents.by),),
    )


def _cause_of(subject: Subject, by: str) -> Cause:
    """Why documents are not what they are alone; that they are not is certain."""
    try:
        return _Look(subject, by).cause()
    except Exception:  # such as a forward that no hooks can watch
        return cause("mixed documents")


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


def _each_alone(subject: Subject, row: FewRows) -> Subject:
    """A subject of a few documents in one row, each of which is a part."""
    parts = [[place] for place in range(row.num_rows)]
    return replace(
        subject, rows=row, parts=parts, options=None, has_batches=True, are_alike=False
    )


def _without_labels_across(row: FewRows, by: str) -> FewRows | None:
    """The documents without labels that are the first token of the next one; None if
    labels are not those of next tokens, or none of them is across a bound."""
    fields, ends = (
        take_apart(row.batch)[0],
        [s.stop - 1 for s in _within(row, by).spans],
    )
    tensors = [(path, value) for path, value in fields if isinstance(value, Tensor)]
    for (path, labels), (_, ids) in itertools.permutations(tensors, 2):
        if "label" not in path.lower() or labels.shape != ids.shape or not labels.ndim:
            continue
        counts = labels[..., :-1] >= 0
        if bool((counts & (labels[..., :-1] != ids[..., 1:])).any()):
            continue
        if bool(counts[..., ends[:-1]].any()):
            others = {id(labels): labels.clone()}
            others[id(labels)][..., ends[:-1]] = row.ignored
            change = partial(_of, others)
            return row.of(with_tensors(row.batch, change))
    return None


def _of(others: Mapping[int, Tensor], value: Tensor) -> Tensor:
    return others.get(id(value), value)


def _within(row: FewRows, by: str) -> Documents:
    """The documents of a row."""
    found = find_documents(row.batch, by)
    assert found is not None
    return found


def _off_from(subject: Subject, row: FewRows) -> float:
    """How far a batch of documents is from another one of them."""
    try:
        return subject.whole().off_from(replace(subject, rows=row).whole())
    except Exception:  # the step refuses what was changed
        return 0.0


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


class _Look:
    """Looks for where documents of one row see each other.

    Args:
        subject: the documents, each a part.
        by: the field that tells them apart.
    """

    def __init__(self, subject: Subject, by: str) -> None:
        self._subject, self._by = subject, by
        found = _within(subject.rows, by)
        self._columns = [torch.arange(span.start, span.stop) for span in found.spans]
        self._width = found.numbers.shape[1]
        self._whole = self._events(subject)

    def cause(self) -> Cause:
        """The first cause that is found: content, then places, then a label."""
        for name, look in (("content", self._content), ("place", self._place)):
            if (event := next(look(), None)) is not None:
                cached = name == "content" and self._is_exact_without_cache()
                return cause("a cache" if cached else name, self._place_of(event))
        if self._counts_first_labels():
            return cause("first label")
        return cause("loss over documents")

    def _content(self) -> Iterator[Event]:
        """Where outputs of documents change with the ids of another."""
        for number, changed in enumerate(self._columns):
            row = self._exchanged(changed)
            events = self._events(replace(self._subject, rows=row))
            others = torch.cat([c for n, c in enumerate(self._columns) if n != number])
            yield from self._unlike(events, others, self._width, others)

    def _place(self) -> Iterator[Event]:
        """Where outputs of a document are not what they are alone."""
        for number, columns in reversed([*enumerate(self._columns)]):
            events = self._events(replace(self._subject, parts=[[number]]))
            yield from self._unlike(events, columns, len(columns), slice(None))

    def _events(self, subject: Subject) -> list[Event]:
        return subject.changed(record_events).whole().result

    def _unlike(
        self, other: Sequence[Event], columns: Tensor, width: int, others: Any
    ) -> Iterator[Event]:
        """The events in which some columns are not those of another step."""
        for mine, theirs in zip(self._whole, other, strict=False):
            if (mine.path, mine.is_output) != (theirs.path, theirs.is_output):
                return
            for one, two in zip(mine.values, theirs.values, strict=False):
                dims = [d for d, size in enumerate(one.shape) if size == self._width]
                if not dims or not one.is_floating_point() or one.ndim != two.ndim:
                    continue
                if two.shape[dims[0]] != width:
                    continue
                one, two = one.movedim(dims[0], 0), two.movedim(dims[0], 0)
                if not alike(one[columns], two[others]):
                    yield mine

    def _exchanged(self, columns: Tensor) -> FewRows:
        """The batch in which one document has what stands elsewhere in the row."""
        batch = self._subject.rows.batch
        fields = {id(value): path for path, value in take_apart(batch)[0]}
        kept = (self._by, "label", "mask", "position", "seq_idx", "cu_")

        def exchanged(value: Tensor) -> Tensor:
            path = fields[id(value)].lower()
            dim = next((d for d, n in enumerate(value.shape) if n == self._width), None)
            if dim is None or any(each.lower() in path for each in kept):
                return value
            turned = value.flip(dim).index_select(dim, columns)
            return value.index_copy(dim, columns, turned)

        return self._subject.rows.of(with_tensors(batch, exchanged))

    def _is_exact_without_cache(self) -> bool:
        """Whether no document sees another once the model makes no cache."""
        configs = [getattr(m, "config", None) for m in self._subject.module.modules()]
        if not any(getattr(each, "use_cache", False) for each in configs):
            return False
        subject = self._subject.changed(_without_cache)
        return Alone(subject).least_off() <= ALARM[subject.rehearsal.dtype]

    def _counts_first_labels(self) -> bool:
        """Whether a document but the first begins with a label that counts."""
        starts = [columns[0] for columns in self._columns[1:]]
        for path, value in take_apart(self._subject.rows.batch)[0]:
            if "label" in path.lower() and value.shape[-1:] == (self._width,):
                return bool((value[..., starts] != -100).any())
        return False

    def _place_of(self, event: Event) -> str:
        """Where something happened: in a module, or between two of its own."""
        parent, _, name = event.path.rpartition(".")
        owner, before = event.path if event.is_output else parent, ""
        for each in self._whole[: self._whole.index(event)]:
            inside, _, child = each.path.rpartition(".")
            if each.is_output and inside == owner:
                before = child
        if event.is_output:
            return f"{event.path} (after {before})" if before else event.path
        where = f"between {before} and {name}" if before else f"before {name}"
        return f"{owner or 'training_step'} ({where})"


def _without_cache(module: Any) -> None:
    for each in module.modules():
        config: Any = getattr(each, "config", None)
        if hasattr(config, "use_cache"):
            config.use_cache = False
