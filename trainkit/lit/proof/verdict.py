"""The measurements of a check, put together into its report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from trainkit.core.joins.steps import JoinedSteps
from trainkit.core.strategies import Strategies
from trainkit.errors import TrainkitError
from trainkit.lit.measure.beside import Beside
from trainkit.lit.measure.passes import Passes
from trainkit.lit.proof import remedies
from trainkit.lit.proof.causes import Causes
from trainkit.lit.proof.findings import Cut, Gradient
from trainkit.lit.proof.measure import MOST_OF_ORDER, Measurements, Parts
from trainkit.lit.proof.order import EarlyHooks
from trainkit.lit.proof.precision import half_precision, in_own_precision
from trainkit.lit.proof.report import Report
from trainkit.lit.proof.rows import FewRows

NAMES: dict[torch.dtype | None, str] = {
    torch.float64: "float64",
    torch.float32: "float32",
}


def measured(
    module: Any,
    rows: FewRows,
    strategies: Strategies,
    callbacks: Sequence[Any],
    joined: JoinedSteps | None = None,
) -> Report:
    """The report, in the widest arithmetic in which `training_step` runs.

    Args:
        module: in `fit`.
        rows: of the training data.
        strategies: what a micro-batch weighs in each term of the loss.
        callbacks: of the run.
        joined: lets BatchNorm see whole windows, if the run does.
    """
    half = half_precision(module.trainer)
    kinds = [torch.float64, torch.float32, *([None] if half else [])]
    failed: list[Exception] = []
    beside = None if joined is None else Beside(joined, rows.others)
    for dtype in kinds:
        try:
            report = _report_in(dtype, module, rows, strategies, callbacks, beside)
        except TrainkitError:
            raise
        except Exception as error:  # an operation that knows no such dtype
            failed.append(error)
            continue
        if dtype is None:
            return _undecided(report, half, failed[-1])
        if failed:
            note = f"measured in {NAMES[dtype]}, since float64 failed: {failed[0]}"
            report = replace(report, notes=(*report.notes, note))
        return report
    raise TrainkitError(
        f"check: training_step failed on {rows.num_rows} rows of the training data: "
        f"{type(failed[0]).__name__}: {failed[0]}"
    ) from failed[0]


def _undecided(report: Report, half: str, why: Exception) -> Report:
    """In half precision, what is within rounding may be anything below it."""
    if report.deviation > report.rounding:
        note = f"measured in {half}, since float32 failed: {why}"
        return replace(report, precision=half, notes=(*report.notes, note))
    cause = remedies.of_precision(half, str(why))
    causes = (*report.causes, cause)
    return replace(report, exact=False, precision=half, causes=causes)


def _report_in(
    dtype: torch.dtype | None,
    module: Any,
    rows: FewRows,
    strategies: Strategies,
    callbacks: Sequence[Any],
    beside: Beside | None,
) -> Report:
    early = EarlyHooks(module, callbacks)
    passes = Passes(module, rows.num_rows, dtype=dtype, strategies=strategies)
    passes.beside = beside
    with passes.prepared():
        found = Measurements(passes, rows)
        halves = early.halves(found)
        report = _report(found, strategies)
    streamed = strategies and not rows.is_split
    report = early.added_to(report, halves, 2.0 if streamed else 1.0)
    half = half_precision(module.trainer)
    if not half or dtype is None:
        return report
    cut, note = in_own_precision(module, strategies, found)
    cuts = (*report.cuts, cut) if cut is not None else report.cuts
    return replace(report, cuts=cuts, notes=(*report.notes, *filter(None, [note])))


def _report(found: Measurements, strategies: Strategies) -> Report:
    as_run = found.rows.as_run
    cuts = [_cut(found, name, parts, strategies) for name, parts in _cuts_of(found)]
    ran = {cut.name: cut.deviation for cut in cuts if cut.deviation is not None}
    worst = max(ran, key=lambda name: ran[name])
    off = ran[worst]
    gradients = found.by_parameter(dict(_cuts_of(found))[worst], as_run, strategies)
    if found.tolerance < off < 30 * MOST_OF_ORDER:
        found.allow_for_order()
    if strategies:
        cuts.append(_cut(found, "plain accumulation", found.parts, {}))
    rounding = found.tolerance
    causes = Causes(found, strategies)
    causes.look(is_off=off > rounding)
    is_moved = any(cause.kind == "state" for cause in causes.causes)
    return Report(
        exact=off <= rounding and not is_moved,
        deviation=off,
        rounding=rounding,
        num_rows=len(found.all_rows),
        precision=NAMES.get(found.passes.dtype, "half precision"),
        cuts=tuple(cuts),
        parameters=_worst(gradients, rounding),
        causes=tuple(
            remedies.with_ways_in(each, found.passes.module, found.first, strategies)
            for each in causes.causes
        ),
        notes=tuple(causes.notes),
        gradients=tuple(gradients),
    )


def _worst(
    gradients: Sequence[Gradient], rounding: float
) -> tuple[tuple[str, float], ...]:
    """The parameters that are off, each as a share of its own gradient's size."""
    off = [
        (each.name, each.off / (each.size or 1.0))
        for each in gradients
        if each.off > rounding
    ]
    return tuple(sorted(off, key=lambda each: -each[1]))


def _cuts_of(found: Measurements) -> list[tuple[str, Parts]]:
    """The cut that the run will use, the one that tells most, and the finest one."""
    of_run = found.rows.parts_of_run
    several = [("the run's cut", of_run)] if len(of_run) > 1 else []
    finest = [[row] for row in found.all_rows]
    return [*several, ("parts", found.parts), ("single rows", finest)]


def _cut(found: Measurements, name: str, parts: Parts, strategies: Strategies) -> Cut:
    sizes = tuple(len(rows) for rows in parts)
    try:
        off = found.off_by(parts, found.rows.as_run, strategies)
    except Exception as error:
        if name == "parts" and isinstance(error, TrainkitError):
            raise
        if name == "parts":
            raise TrainkitError(
                f"check: training_step ran on all {len(found.all_rows)} rows, and "
                f"failed on a part of them: {error}"
            ) from error
        return Cut(name, sizes, None, f"training_step fails on such parts: {error}")
    return Cut(name, sizes, off)
