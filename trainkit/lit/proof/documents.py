"""Whether documents that share a row see each other, and where."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trainkit.core.document_fields import MASKS
from trainkit.core.documents import Documents, documents_option, find_documents
from trainkit.core.nested import take_apart, with_tensors
from trainkit.core.split.micro_batching import MicroBatching, is_inside
from trainkit.core.terms import leading
from trainkit.lit.proof.places import Event, first_unlike, record_events
from trainkit.lit.proof.report import ALARM, SURELY_ROUNDING, Cause, Report
from trainkit.lit.proof.rows import FewRows
from trainkit.lit.proof.subject import Subject, in_first
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
    one = OneRow.of(batch, MicroBatching(size=1, documents=documents.by), own, chosen)
    # Documents have other numbers than rows, and so other draws.
    packed = replace(
        subject.varied(noted={}), rows=one.rows, options=None, has_batches=True,
        parts=[[place] for place in range(len(chosen))], are_alike=False,
    )  # fmt: skip

    def apart(dtype: torch.dtype) -> tuple[tuple[Subject, float], bool]:
        used = packed.varied(dtype=dtype)
        off = Alone.of(used).least_off()
        return (used, off), off <= SURELY_ROUNDING

    packed, off = in_first(precisions, apart)
    dtype, found = packed.rehearsal.dtype, None
    if off <= ALARM[dtype]:
        clean = _without_labels_across(one)
        off = 0.0 if clean is None else _off_from(packed, clean)
        if off <= ALARM[dtype]:
            return None
        found = cause("last label")
    found = found or _cause_of(packed, one)
    if is_inside(subject.options) and found.text == cause("loss over documents").text:
        return None  # which a cut of the module leaves as it is
    return Report(
        exact=False,
        deviation=off,
        rounding=packed.most_rounding,
        num_rows=len(chosen),
        precision=str(dtype).removeprefix("torch."),
        parts=(1,) * len(chosen),
        causes=(found,),
    )


def _cause_of(subject: Subject, row: OneRow) -> Cause:
    """Why documents are not what they are alone; that they are not is certain."""
    try:
        return _Look(subject, row).cause()
    except Exception:  # such as a forward that no hooks can watch
        return cause("content")


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


@dataclass(frozen=True)
class OneRow:
    """A few documents in a row of their own.

    Attributes:
        batch: which has this row.
        rows: the documents, each a row.
        documents: where they lie.
        again: makes the rows of another batch, in which documents lie alike.
    """

    batch: Any
    rows: FewRows
    documents: Documents
    again: Callable[[Any], FewRows]

    @classmethod
    def of(
        cls, batch: Any, options: MicroBatching, strategy: Any, chosen: Sequence[int]
    ) -> OneRow:
        """Some documents of a batch, one behind the other."""
        again = partial(FewRows, options=options, strategy=strategy)
        row = again(batch).make(chosen)
        documents = find_documents(row, options.documents)
        assert documents is not None
        return cls(row, again(row), documents, again)

    def changed(self, change: Callable[[Tensor], Tensor]) -> OneRow:
        """Documents that lie alike in another batch."""
        batch = with_tensors(self.batch, change)
        return replace(self, batch=batch, rows=self.again(batch))


def _without_labels_across(row: OneRow) -> OneRow | None:
    """The documents without labels that are the first token of the next one; None if
    labels are not those of next tokens, or none of them is across a bound."""
    ends = [span.stop - 1 for span in row.documents.spans][:-1]
    fields = [pair for pair in take_apart(row.batch)[0] if isinstance(pair[1], Tensor)]
    for path, labels in fields:
        counts = labels[..., :-1] >= 0 if "label" in path.lower() else labels[:0]
        if not counts.numel() or not bool(counts[..., ends].any()):
            continue
        nexts = [ids[..., 1:] for _, ids in fields if ids.shape == labels.shape]
        if any(not bool((counts & (labels[..., :-1] != ids)).any()) for ids in nexts):
            clean = labels.clone()
            clean[..., ends] = row.rows.ignored
            return row.changed(lambda each: clean if each is labels else each)  # noqa: B023
    return None


def _off_from(subject: Subject, row: OneRow) -> float:
    """How far a batch of documents is from another one of them."""
    try:
        return subject.whole().off_from(replace(subject, rows=row.rows).whole())
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
        row: where they lie.
    """

    def __init__(self, subject: Subject, row: OneRow) -> None:
        self._subject, self._row, self._documents = subject, row, row.documents
        self._width = self._documents.numbers.shape[1]

    def cause(self) -> Cause:
        """The first cause that is found: content, then places, then a label."""
        for name, look in (("content", self._content), ("place", self._place)):
            if (place := look()) is not None:
                cached = name == "content" and self._is_exact_without_cache()
                return cause("a cache" if cached else name, place)
        if self._counts_first_labels():
            return cause("first label")
        return cause("loss over documents")

    def _content(self) -> str | None:
        """Where outputs of a document change with the ids of another."""
        events, spans = self._events(self._subject), self._documents.spans
        whole = [_narrowed(each, self._width) for each in events]
        for changed in range(len(spans)):
            rows = self._exchanged(changed).rows
            others = [self._columns(n) for n in range(len(spans)) if n != changed]
            columns = [column for each in others for column in each]
            events = self._events(replace(self._subject, rows=rows))
            events = [_narrowed(each, self._width, columns) for each in events]
            event = first_unlike(whole, events, columns, self._width)
            if event is not None:
                return event.path
        return None

    def _place(self) -> str | None:
        """Where outputs of a document are not what they are alone."""
        whole = self._events(self._subject)
        for place in reversed(range(len(self._documents.spans))):
            alone = self._events(replace(self._subject, parts=[[place]]))
            event = first_unlike(whole, alone, self._columns(place), self._width)
            if event is not None:
                return event.path
        return None

    def _events(self, subject: Subject) -> list[Event]:
        return subject.changed(record_events).whole().result

    def _columns(self, place: int) -> list[int]:
        span = self._documents.spans[place]
        return [*range(span.start, span.stop)]

    def _exchanged(self, place: int) -> OneRow:
        """The batch in which one document has what stands elsewhere in the row."""
        fields = {id(value): path for path, value in take_apart(self._row.batch)[0]}
        width, columns = self._width, torch.tensor(self._columns(place))
        kept = (self._documents.by, "label", "mask", "position", "seq_idx", "cu_")

        def exchanged(value: Tensor) -> Tensor:
            path = fields[id(value)].lower()
            dim = next((d for d, n in enumerate(value.shape) if n == width), None)
            if dim is None or any(each.lower() in path for each in kept):
                return value
            turned = value.flip(dim).index_select(dim, columns)
            return value.index_copy(dim, columns, turned)

        return self._row.changed(exchanged)

    def _is_exact_without_cache(self) -> bool:
        """Whether no document sees another once the model makes no cache."""
        configs = [getattr(m, "config", None) for m in self._subject.module.modules()]
        if not any(getattr(each, "use_cache", False) for each in configs):
            return False
        subject = self._subject.changed(_without_cache)
        return Alone.of(subject).least_off() <= ALARM[subject.rehearsal.dtype]

    def _counts_first_labels(self) -> bool:
        """Whether a document but the first begins with a label that counts."""
        starts = torch.tensor([span.start for span in self._documents.spans[1:]])
        for path, value in take_apart(self._row.batch)[0]:
            if "label" in path.lower() and value.shape[-1:] == (self._width,):
                return bool((value[..., starts] != -100).any())
        return False


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
