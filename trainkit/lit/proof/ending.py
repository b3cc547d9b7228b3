"""Rows that are made to end earlier: where all count alike, or none of them pads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trainkit.core.nested import take_apart
from trainkit.core.split.micro_batching import MicroBatching
from trainkit.core.strategies import Strategies
from trainkit.core.terms import telling_lengths
from trainkit.errors import TrainkitError
from trainkit.lit.proof.rehearse import Rehearsal, refuse_backend
from trainkit.lit.proof.report import NotMeasured, in_one_line
from trainkit.lit.proof.rows import FewRows
from trainkit.lit.proof.subject import Subject

KEEP = "keep the loader batch's width"

LABELS = ("label", "target", "tgt")
"""Within the name of a field that holds labels."""


def ended(subject: Subject, few: Sequence[int]) -> Subject | None:
    """A subject of which some rows end where half of the labels are over in one; None
    if nothing says where a row ends, or nothing would be left in one that counts.

    From there on labels are ignored, and masks are 0. All other fields continue.
    """
    own, at = subject.rows, list(few)
    fields = {p: each for p, each in _countable(own).items() if each[0].ndim > 1}
    if not fields or own.collate_of_run is not None:
        return None
    ends = [_firsts_and_halves(v[at] != none) for v, none in fields.values()]
    # In each row something still counts, and of causal models a second label.
    stop = max(2, min(int(half.min()) for _, half in ends))
    stop = max(stop, *(int(first.max()) for first, _ in ends))
    stop = min(stop, *(value.shape[1] - 1 for value, _ in fields.values()))
    parts, build = take_apart(own.batch)
    values = []
    for path, value in parts:  # of which two may be one tensor
        if path in fields:
            value = value.clone()
            value[at, stop:] = fields[path][1]
        values.append(value)
    rows = own.again(build(iter(values)))
    if not bool((rows.counts(few, [own.strategy.weight]) > 0).all()):
        return None
    return replace(subject.varied(ignored=own.ignored), rows=rows)


def may_count_unlike(rows: FewRows) -> bool:
    """Whether a mask or labels may count otherwise in other rows than in these."""
    found = [value for value, _ in _countable(rows).values()]
    return any(each.ndim > 1 or bool((each == each[0]).all()) for each in found)


def are_told_by_labels(rows: FewRows) -> bool:
    """Whether the strategy's labels or weights alone tell lengths, and nobody has said
    that they do."""
    if rows.collate is not None or rows.layout is None:
        return False
    is_named = getattr(rows.options, "lengths", None) is not None
    return not is_named and bool(rows.layout.rows.by_labels)


def _firsts_and_halves(counts: Tensor) -> tuple[Tensor, Tensor]:
    """In each row: the column behind the first that counts, and behind half of them."""
    done = counts.flatten(2).any(2) if counts.ndim > 2 else counts
    done = done.long().cumsum(1)
    return (done < 1).sum(1) + 1, (2 * done < done[:, -1:]).sum(1) + 1


def _countable(rows: FewRows) -> dict[str, tuple[Tensor, int]]:
    """Masks and labels of all rows, and what does not count in each."""
    fields = [
        (path, value)
        for path, value in take_apart(rows.batch)[0]
        if isinstance(value, Tensor) and value.ndim and len(value) == rows.num_rows
    ]
    own = [getattr(rows.strategy, name, None) for name in ("labels", "mask")]
    named = {*map(str, [*own, *getattr(rows.options, "length_paths", ())])}
    last = fields[-1][0] if len(fields) > 1 or "1" in dict(fields) else None
    found = {}
    for path, value in fields:
        name = path.rpartition(".")[2].lower()
        is_label = name == "y" or any(each in name for each in LABELS)
        is_label |= path in named or path == last and path.isdigit()
        is_binary = bool(((value == 0) | (value == 1)).all())
        is_mask = path == str(own[1]) or path != str(own[0]) and is_binary
        is_wide = value.ndim > 1 and value.shape[1] > 1
        is_number = value.is_floating_point() or value.is_complex()
        if is_mask and is_wide and (is_label or "mask" in name):
            found[path] = value, 0
        elif is_label and not (is_number or value.dtype is torch.bool):
            if is_wide or value.ndim == 1:
                found[path] = value, rows.ignored
    return found


def may_trim(
    rehearsal: Rehearsal, strategies: Strategies, options: MicroBatching, batch: Any
) -> tuple[bool, str, bool]:
    """Whether micro-batches may leave out columns that only pad; why not, if that is to
    be said; and whether padding is seen that is there.

    Args:
        rehearsal: runs four rows, with these columns and without.
        strategies: what a micro-batch weighs.
        options: how loader batches are cut.
        batch: of the run.

    Raises:
        TrainkitError: micro-batches are to be filled, and the model sees it.
    """
    if options.collate is not None or not options.trim:
        return False, "", False
    try:
        refuse_backend(rehearsal.trainer)
        off, by_labels, is_made = _off_trimmed(rehearsal, strategies, options, batch)
    except Exception as error:
        how = "are filled; it" if options.shapes else f"{KEEP}, since it"
        text = f"micro-batches {how} could not be measured whether the model sees its"
        return False, f"{text} padding: {in_one_line(error)}", False
    if not off:
        return off is not None, "", False
    far = f"the gradient of some rows is off by {off:.2g} of its size"
    if options.shapes:
        raise TrainkitError(
            f"MicroBatching shapes: the model sees its padding: without it, {far}, and "
            f"columns that fill a micro-batch would change it. Mask padding in the "
            f"model, or leave shapes out."
        )
    if is_made and not by_labels:
        made = "made to end earlier, what stands behind its end is seen"
        return False, f"micro-batches {KEEP}: where a row is {made} ({far})", False
    sees, remedy = "its padding", "mask padding in the model"
    if by_labels:
        sees = "what stands behind a row's last label"
        remedy = "name the mask, lengths='path.to.mask', or the labels if rows end so"
    text = f"the model sees {sees}: without it, {far}, so micro-batches {KEEP}"
    return False, f"{text}; to compute less, {remedy}", True


def _off_trimmed(
    rehearsal: Rehearsal, strategies: Strategies, options: MicroBatching, batch: Any
) -> tuple[float | None, bool, bool]:
    """How far gradients of four rows are off without the columns that pad on one side
    of all of them; None if rows do not pad, nor can be made to. Whether labels alone
    tell lengths. And whether rows were made to end earlier: where none pads, and where
    labels alone tell lengths, behind the last of which a row may continue."""
    rows = FewRows.cut_from(batch, options, telling_lengths(strategies), trims=True)
    subject = Subject(rehearsal, strategies, None, rows, [], has_batches=False)
    by_labels = are_told_by_labels(rows)
    chosen = [rows.shortest(4, side) for side in _padded_sides(rows)]
    if is_made := by_labels or not chosen:
        some = [row for row, length in enumerate(rows.lengths) if length > 1]
        chosen = [rows.shortest(4, some)]
        found = ended(subject, chosen[0]) if some else None
        sides = [] if found is None else _padded_sides(found.rows)
        if found is None or not any({*chosen[0]} <= {*side} for side in sides):
            return None, by_labels, is_made
        subject = found
    wide, offs = replace(subject, rows=subject.rows.wide), []
    # Beside a row that begins with the first column, nothing is left out in front.
    for each in chosen:
        whole = wide.whole(each)
        if not 0 < whole.size < float("inf"):
            raise NotMeasured("the gradient of the shortest rows is zero or not finite")
        offs.append(subject.whole(each).off_from(whole))
    return max(offs) if max(offs) > subject.most_rounding else 0.0, by_labels, is_made


def _padded_sides(rows: FewRows) -> list[list[int]]:
    """For each side on which columns pad: the rows that have such columns."""
    sides: list[list[int]] = []
    if rows.layout is None or rows.layout.rows.are_joined:
        return sides
    for width, each in rows.layout.rows.spans.items():
        spans = list(enumerate(each))
        sides.append([row for row, (start, _) in spans if start > 0])
        sides.append([row for row, (_, stop) in spans if stop < width])
    return [rows for rows in sides if rows]
