"""One measurement, for the proof at the start of a run and for `check`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

from trainkit.core.strategies import Uniform
from trainkit.core.terms import leading
from trainkit.errors import TrainkitError
from trainkit.lit.aside import LIGHTNINGS
from trainkit.lit.proof.causes import look
from trainkit.lit.proof.copying import collates_by_itself
from trainkit.lit.proof.denominators import MEANT, candidates
from trainkit.lit.proof.documents import of_documents
from trainkit.lit.proof.ending import are_told_by_labels, ended, may_count_unlike
from trainkit.lit.proof.report import (
    ALARM,
    SURELY_ROUNDING,
    Cause,
    NotMeasured,
    Report,
)
from trainkit.lit.proof.rows import has_equal_batches, shares_of
from trainkit.lit.proof.subject import Subject, in_first

FULL_PRECISIONS = ("32-true", "64-true", "32", "64")

CANNOT_TELL = (
    "these rows all count alike, so PerSample and PerToken look the same on them"
)
ONE_LENGTH = "these rows all have one length"
ENDING = "with one ending earlier, the gradient is off by {:.2g} of its size"
ONE_WIDTH = (
    "the model sees its padding: if the batches of this stream are each padded to a "
    "width of their own, the gradient is off by {:.2g} of its size; if all have one "
    "width, it is not"
)
BEHIND = (
    "the model sees what stands behind a row's last label, and nothing else tells how "
    "long rows are: if that is padding, and batches have widths of their own, the "
    "gradient is off by {:.2g} of its size; an attention_mask in the batch tells"
)
BY_CHANCE = (
    "Uniform() weighs all parts alike, and batches of this loader may be of unequal "
    "sizes, so it is right by chance"
)
MAYBE_ROUNDING = (
    "off by {:.0e} in float32, which may be more than rounding, and the step does not "
    "run in float64"
)


def measured(subject: Subject, precisions: Sequence[torch.dtype]) -> Report:
    """How far the run's window is from the big batch, and why.

    Rows that all count alike are made to differ, if that can be had.

    Args:
        subject: the rows, and how they are run.
        precisions: of the arithmetic, that first which is tried first.
    """
    if (mixed := of_documents(subject, precisions)) is not None:
        return mixed
    unlike, doubt = _unlike(subject, precisions)
    if unlike is not None and not unlike.is_off:
        return unlike
    found = _compared(subject, precisions)
    if not doubt or not found.exact:
        return found
    return replace(found, exact=False, doubt=doubt)


def _unlike(
    subject: Subject, precisions: Sequence[torch.dtype]
) -> tuple[Report | None, str]:
    """What is measured where rows that are all alike are made to differ, and what
    nobody can say without it; None and "" where they differ anyway."""
    rows, few, doubt = subject.rows, subject.parts[0], ""
    count_alike = bool(subject.strategies) and _count_alike(subject)
    if not (count_alike or subject.strategies and rows.has_one_length):
        return None, ""
    if count_alike and (may_count_unlike(rows) or rows.has_one_length):
        doubt = CANNOT_TELL
    with contextlib.suppress(Exception):  # the step refuses what was changed
        unlike = ended(subject, few)
        if unlike is not None and not (count_alike and _count_alike(unlike)):
            report = _compared(unlike, precisions)
            off = ENDING.format(report.deviation)
            return report, f"{doubt or ONE_LENGTH}; {off}"
    return None, doubt


def _count_alike(subject: Subject) -> bool:
    """Whether these rows count alike by all that labels and masks may count."""
    rows, of = subject.rows, subject.all_rows
    named = [c for c in candidates(rows.make(of), {}) if c.simplicity <= MEANT]
    own = leading(subject.strategies)
    counts = rows.counts(of, [own.weight, *(each.weigh for each in named)])
    counts = counts[:, counts.sum(0) != 0]
    places = [[of.index(row) for row in part] for part in subject.parts]
    shares = shares_of(counts, places, own)
    return shares.numel() > 0 and bool((shares - shares[:, :1]).abs().max() < 1e-6)


def _compared(subject: Subject, precisions: Sequence[torch.dtype]) -> Report:
    subject = in_first(precisions, partial(_rehearsed, subject))
    off, dtype = subject.off(), subject.rehearsal.dtype
    report = Report(
        exact=off <= subject.most_rounding,
        deviation=off,
        rounding=subject.most_rounding,
        num_rows=len(subject.all_rows),
        precision=str(dtype).removeprefix("torch."),
        parts=tuple(map(len, subject.parts)),
        left_out=_left_out(subject),
    )
    if off > ALARM[dtype]:
        rows = subject.rows
        is_cut = rows.collate is None and not subject.is_split
        numbers = rows.whole_numbers() if is_cut else []
        if numbers:
            raise NotMeasured(
                f"field {numbers[0]!r} is a number of the whole loader batch, which "
                f"rows that are cut from it keep; trainkit.check makes batches anew"
            )
        causes, doubt = list[Cause](), ""
        with contextlib.suppress(Exception):  # what is found so far is said
            look(subject, causes)
        if [each.kind for each in causes] == ["padding"]:
            doubt = ONE_WIDTH if rows.is_stream else doubt
            doubt = BEHIND if are_told_by_labels(rows) else doubt
        return replace(
            report,
            causes=tuple(causes),
            parameters=_parameters_off(subject),
            doubt=doubt.format(off),
        )
    if not report.exact:
        return replace(report, doubt=MAYBE_ROUNDING.format(off))
    own = subject.strategy
    if not isinstance(own, Uniform) or own.loss_reduction != "mean":
        return report
    has_equal = has_equal_batches(subject.trainer.train_dataloader)
    if subject.is_split or subject.has_batches and not has_equal:
        return replace(report, exact=False, doubt=BY_CHANCE)
    return report


def _rehearsed(subject: Subject, dtype: torch.dtype) -> tuple[Subject, bool]:
    """A subject in one arithmetic, and whether that tells what is rounding."""
    used = subject.varied(dtype=dtype)
    size = used.as_one.size
    if not size:
        raise NotMeasured("the gradient of these rows is zero")
    if not size < float("inf"):
        raise NotMeasured("the gradient of these rows is not finite")
    if not used.as_run.size < float("inf"):
        raise NotMeasured("cut into parts, these rows have no finite gradient")
    return used, used.as_run.is_surely(used.as_one, SURELY_ROUNDING)


def _left_out(subject: Subject) -> tuple[str, ...]:
    """What a rehearsal has not done as the run does it, in words."""
    trainer, precision = subject.trainer, str(subject.trainer.precision)
    both = subject.as_one, subject.as_run
    found = sorted({each for taken in both for each in taken.draws.left_out})
    if precision not in FULL_PRECISIONS:
        found.append(f"precision {precision}")
    if trainer.gradient_clip_val and subject.module.automatic_optimization:
        found.append("clipping")
    if subject.rows.collate is None and collates_by_itself(trainer.train_dataloader):
        found.append("the collate function")
    if isinstance(getattr(trainer.train_dataloader, "dataset", None), IterableDataset):
        found.append("later batches")
    for kind in map(type, (trainer.precision_plugin, trainer.strategy)):
        if not kind.__module__.startswith(LIGHTNINGS):  # a copy runs without it
            found.append(kind.__name__)
    return tuple(found)


def _parameters_off(subject: Subject) -> tuple[tuple[str, float], ...]:
    """The parameters that are off by more than rounding, worst first."""
    whole, most = subject.as_one, subject.most_rounding
    off = whole.apart(subject.as_run).items()
    shares = [(name, each / whole.size) for (_, _, name), each in off]
    return tuple(sorted((s for s in shares if s[1] > most), key=lambda each: -each[1]))


def of_all_ranks(trainer: Any, measure: Callable[[], Report]) -> tuple[Report, int]:
    """The report of the rank that is furthest from exact, and which it is, on every
    rank alike. A rank that fails lets the others wait for nobody.

    Raises:
        TrainkitError: another rank failed.
    """
    own: Report | str
    failure: Exception | None = None
    try:
        own = measure()
    except Exception as error:
        own, failure = f"{type(error).__name__}: {error}", error
    each: list[Any] = [own]
    if trainer.world_size > 1 and dist.is_initialized():
        each *= trainer.world_size
        dist.all_gather_object(each, own)
    if failure is not None:
        raise failure
    for rank, its in enumerate(each):
        if isinstance(its, str):
            raise TrainkitError(f"check: rank {rank} failed: {its}")
    worst = max(range(len(each)), key=lambda rank: _badness(each[rank]))
    return each[worst], worst


def _badness(report: Report) -> tuple[bool, bool, int, float]:
    return report.is_off, not report.exact, len(report.causes), report.deviation
