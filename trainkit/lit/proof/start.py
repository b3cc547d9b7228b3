"""The proof at the start of a run: rehearsed on a few rows of its first batch."""

from __future__ import annotations

import contextlib
import warnings
from dataclasses import replace
from typing import Any

import torch

from trainkit.core.strategies import Uniform
from trainkit.core.terms import leading
from trainkit.errors import TrainkitError
from trainkit.lit.callback.base import WindowOwner
from trainkit.lit.callback.table import say
from trainkit.lit.probe.rows import num_elements
from trainkit.lit.proof.causes import first_cause
from trainkit.lit.proof.copying import read_apart
from trainkit.lit.proof.denominators import candidates, classes
from trainkit.lit.proof.rehearse import Rehearsals
from trainkit.lit.proof.rows import (
    FewRows,
    Parts,
    collates_by_itself,
    has_equal_batches,
    samples_across,
    shares_of,
    unlike_parts,
)
from trainkit.lit.proof.subject import (
    Subject,
    check_size,
    has_parts,
    largest,
    left_out_of,
    refuse_backend,
    refuse_draws,
)
from trainkit.lit.proof.verdict import (
    SURELY_ROUNDING,
    NotMeasured,
    Verdict,
    in_one_line,
)

SIZES = ((3, 2, 2), (3, 2), (2, 2), (2, 1), (1, 1))
"""Rows in the parts, where batches of the run may be unlike."""

EQUAL_SIZES = ((2, 2, 2), (2, 2), (1, 1, 1), (1, 1))

CANNOT_TELL = (
    "these rows all count alike, so PerSample and PerToken look the same on them "
    "(trainkit.check measures more rows)"
)
ALIKE = "with some labels of one row ignored, the gradient is off by {:.2g} of its size"
ONE_LENGTH = (
    "these rows all have one length, and the model would see padding, if other batches "
    "have some"
)
GUESS = (
    "some rows of the batch end in one number, as if padded, and nothing names their "
    "lengths; without these columns, the gradient would differ"
)
ONE_CLASS = (
    "All rows of this batch have one class; it is seen with another class in one row."
)


class ProofAtStart:
    """Measures once, and says what was found.

    Args:
        trainer: in `fit`.
        module: what it trains.
        windows: the callback that divides windows.
    """

    label = "proof"
    is_on = True

    def __init__(self, trainer: Any, module: Any, windows: WindowOwner) -> None:
        self._trainer, self._module, self._windows = trainer, module, windows
        self._pads = False  # whether other batches may be padded, and this one is not
        self._guesses = True  # whether padding is guessed where nothing tells it

    def run(self, batch: Any) -> None:
        """Measure on rows of the first batch, as the loader has yielded it."""
        windows = self._windows
        has_several = has_parts(self._trainer, self._module, windows)
        is_asked = self.is_on and windows.proof != "off"
        if not is_asked or not (windows.inside is not None or has_several):
            return
        try:
            verdict = self._measured(batch)
        except Exception as error:
            verdict = Verdict(None, cause=in_one_line(error))
        self.tell(verdict)

    def _measured(self, batch: Any) -> Verdict:
        trainer, module, windows = self._trainer, self._module, self._windows
        refuse_backend(trainer)
        options, strategies = windows.micro_batching, windows.strategies
        is_split = windows.is_split
        if windows.inside is not None:
            options = replace(options, inside=tuple(windows.inside.paths))
        elif is_split and not windows.split.trims:
            options = replace(options, trim=False)
        has_batches = not is_split and has_parts(trainer, module, windows)
        own = leading(strategies)
        rows = FewRows(batch, options if is_split else None, own)
        if has_batches:
            rows = self._made_anew(rows, own)
        subject = Subject(
            trainer,
            module,
            strategies if windows.has_strategy else {},
            options,
            Rehearsals(trainer, module, windows),
            rows,
            self._parts(rows),
            has_batches=has_batches,
        )
        verdict = self._verdict(subject)
        left_out = [*sorted(subject.left_out)]
        left_out += left_out_of(trainer, collates=rows.collates)
        return replace(verdict, left_out=tuple(left_out))

    def _made_anew(self, rows: FewRows, strategy: Any) -> FewRows:
        """Rows of unlike lengths, as the run's loader puts them together, if it has a
        collate function of its own; else those of the batch."""
        loader = self._trainer.train_dataloader
        if not collates_by_itself(loader):  # torch's own stacks rows, and pads none
            self._guesses = getattr(loader, "batch_sampler", None) is None
            return rows
        samples = samples_across(loader)
        self._guesses = not samples
        self._pads = not samples and rows.have_one_length
        if len(set(map(num_elements, samples))) <= 1:
            return rows
        collate = read_apart(loader.collate_fn)
        return FewRows(None, None, strategy, samples=samples, collate=collate)

    def _parts(self, rows: FewRows) -> Parts:
        """Some rows in parts, so that what may be counted differs between them."""
        is_equal = has_equal_batches(self._trainer.train_dataloader)
        usual = EQUAL_SIZES if is_equal and not self._windows.is_split else SIZES
        sizes = [each for each in usual if sum(each) <= rows.num_rows]
        if not sizes:
            raise NotMeasured(
                f"a loader batch has {rows.num_rows} row, which cannot be cut"
            )
        pool, own = rows.shortest(), leading(self._windows.strategies)
        known = candidates(rows.make(pool), {})
        counts = rows.counts(pool, [own.weight, *(each.weigh for each in known)])
        named = [*classes(rows.make(pool), len(pool))]
        lengths, most = rows.lengths(), max(sizes[0])

        def cut(places: list[int]) -> Parts:
            parts = rows.cut([pool[place] for place in places], most)
            return [[pool.index(row) for row in part] for part in parts]

        found = unlike_parts(
            counts,
            sizes[0],
            [lengths[row] for row in pool],
            own=0,
            classes=rows.counts(pool, named) if named else None,
            cut=cut if self._windows.is_split else None,
        )
        return [[pool[place] for place in part] for part in found]

    # ---- the verdict -----------------------------------------------------------------

    def _verdict(self, subject: Subject) -> Verdict:
        """What was measured, on rows that count unlike if that can be had."""
        changed, pads = None, self._pads
        if subject.strategies and (pads or self._count_alike(subject)):
            changed = subject.rows.with_fewer_labels(subject.parts[0])
        if changed is None:
            return self._off(subject)
        unlike = replace(subject, rows=changed)
        off = self._off_or_none(replace(unlike, are_alike=True))
        if off is not None and not off.is_off:
            padded = off
            if pads and not changed.has_classes:
                padded = self._off_or_none(unlike)
            if padded is not None and not padded.is_off:
                return padded
        found = self._off(subject)
        if found.is_off:
            return found
        if off is None:
            return replace(found, doubt=CANNOT_TELL)
        if not off.is_off:
            return replace(found, doubt=ONE_LENGTH)
        if changed.has_classes:
            return replace(off, cause=ONE_CLASS)
        return replace(found, doubt=f"{CANNOT_TELL}; {ALIKE.format(off.off)}")

    def _off_or_none(self, subject: Subject) -> Verdict | None:
        """How far the window is off, if such rows can be run."""
        try:
            return self._off(subject)
        except Exception:
            return None

    def _count_alike(self, subject: Subject) -> bool:
        """Whether these rows count alike by all that labels and masks may count."""
        rows, of = subject.rows, subject.all_rows
        named = [c for c in candidates(rows.make(of), {}) if c.simplicity <= 2]
        own = leading(subject.strategies)
        counts = rows.counts(of, [own.weight, *(each.weigh for each in named)])
        counts = counts[:, counts.sum(0) != 0]
        places = [[of.index(row) for row in part] for part in subject.parts]
        shares = shares_of(counts, places)
        shares = shares if isinstance(own, Uniform) else shares[:, :-1]
        return bool((shares - shares[:, :1]).abs().max() < 1e-6)

    def _off(self, subject: Subject) -> Verdict:
        """How far the window is from the big batch, and why.

        Where it is only guessed what is padding, it can raise doubts, and no more.
        """
        if subject.rows.is_guess and not subject.are_alike:
            found = self._off(replace(subject, are_alike=True))
            if not self._guesses:
                return found
            with contextlib.suppress(Exception):
                if not found.is_off and self._off_by(subject).is_off:
                    return replace(found, doubt=GUESS)
            return found
        return self._off_by(subject)

    def _off_by(self, subject: Subject) -> Verdict:
        whole, used = subject.whole(), subject
        check_size(whole)
        window = subject.window()
        off = window.off_from(whole)
        if subject.rehearsals.dtype is torch.float32 and off > SURELY_ROUNDING:
            with contextlib.suppress(Exception):  # not every operation knows float64
                wide = subject.in_float64()
                whole, window = wide.whole(), wide.window()
                off, used = window.off_from(whole), wide
        dtype = used.rehearsals.dtype
        verdict = Verdict(off, len(subject.all_rows), dtype)
        if verdict.is_off:
            refuse_draws(used, whole, window)
            numbers = subject.rows.whole_numbers() if subject.has_batches else []
            if numbers:
                raise NotMeasured(
                    f"field {numbers[0]!r} is a number of the whole loader batch, "
                    f"which rows that are cut from it keep; trainkit.check makes "
                    f"batches anew"
                )
            return replace(verdict, cause=first_cause(used))
        return verdict

    # ---- all ranks -------------------------------------------------------------------

    def tell(self, verdict: Verdict) -> None:
        """Say what was found, on all ranks alike.

        Raises:
            TrainkitError: the run requires it to be exact, and it is not.
        """
        trainer = self._trainer
        self._windows.is_measured = verdict.off is not None
        badness = 2 * verdict.is_off or int(not verdict.is_measured)
        worst = largest(trainer, float(badness))
        off = largest(trainer, -1.0 if verdict.off is None else verdict.off)
        if badness < worst:
            verdict = replace(verdict, off=None, cause="another rank cannot measure")
            if worst == 2:
                cause, wide = "It was found on another rank.", torch.float64
                verdict = replace(verdict, off=off, dtype=wide, cause=cause)
        if worst and self._windows.proof == "require":
            raise TrainkitError(
                f'proof="require": {verdict.text.rstrip(".")}. trainkit.check(module, '
                f'data) says more; proof="warn" trains all the same.'
            )
        if not trainer.is_global_zero:
            return
        say(trainer, (self.label, verdict.text))
        if worst == 2:
            warnings.warn(f"{self.label}: {verdict.text}", stacklevel=2)
