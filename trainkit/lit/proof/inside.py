"""The check of the inner cut: submodules in chunks of rows against all rows at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainkit.core.joins.engine import Memory
from trainkit.core.joins.inside import JoinedChunks
from trainkit.core.joins.intercepted import installed
from trainkit.core.joins.layers import Sharing
from trainkit.core.split.micro_batching import MicroBatching
from trainkit.lit.inside.cuts import InsideCuts
from trainkit.lit.measure.passes import Passes
from trainkit.lit.proof.findings import Cause, Cut, Gradient
from trainkit.lit.proof.measure import THRESHOLDS
from trainkit.lit.proof.report import Report
from trainkit.lit.proof.rows import FewRows


def measured_inside(
    module: Any, rows: FewRows, options: MicroBatching, memory: Memory | None = None
) -> Report:
    """The report of a run in which submodules run in chunks of rows.

    Args:
        module: in `fit`.
        rows: of the training data.
        options: with `inside`.
        memory: how chunks share BatchNorm's statistics, if they do.
    """
    joined = None if memory is None else JoinedChunks(module, memory, Sharing())
    with installed(joined):
        return _measured(module, rows, options, joined)


def _measured(
    module: Any, rows: FewRows, options: MicroBatching, joined: JoinedChunks | None
) -> Report:
    every = list(range(rows.num_rows))
    passes = Passes(module, rows.num_rows, dtype=torch.float64)
    cuts = InsideCuts(module, options)
    most = rows.num_rows - 1
    sizes = sorted({min(options.size or 4, most), min(3, most), 1}, reverse=True)
    found: list[tuple[Cut, list[Gradient]]] = []
    batch = rows.whole()
    if joined is not None:
        cuts.couple(joined)
    cuts.start()
    cuts.prepare(module.trainer, batch)
    try:
        with passes.prepared():
            with cuts.whole():
                whole = passes.gradients(batch, every)
                again = passes.gradients(batch, every)
            least = THRESHOLDS[torch.float64]
            rounding = max(least, 30 * _off(_apart(passes.names, whole, again)))
            for size in sizes:
                with cuts.measured(size, passes.around_chunk, passes.turning):
                    gradients = passes.gradients(batch, every)
                apart = _apart(passes.names, whole, gradients)
                chunks = tuple(min(size, len(every) - at) for at in every[::size])
                found.append((Cut(f"chunks of {size}", chunks, _off(apart)), apart))
    finally:
        cuts.stop()
    worst, apart = max(found, key=lambda each: each[0].deviation or 0.0)
    off = worst.deviation or 0.0
    is_exact = off <= rounding
    cause = Cause(
        "rows",
        cuts.names,
        "chunks of rows do not give what all rows give",
        ("name a submodule whose rows do not see each other",),
    )
    apart = sorted(apart, key=lambda each: -each.off)
    worse = [(each.name, each.off / (each.size or 1.0)) for each in apart]
    return Report(
        exact=is_exact,
        deviation=off,
        rounding=rounding,
        num_rows=len(every),
        precision="float64",
        cuts=tuple(cut for cut, _ in found),
        parameters=() if is_exact else tuple(worse),
        causes=() if is_exact else (cause,),
        gradients=tuple(apart),
    )


def _apart(
    names: list[str], whole: list[Tensor | None], other: list[Tensor | None]
) -> list[Gradient]:
    """How far each parameter's gradient is from the whole's, and its size there."""
    sizes = [0.0 if one is None else float(one.norm()) for one in whole]
    size = sum(each**2 for each in sizes) ** 0.5 or 1.0
    pairs = zip(whole, other, strict=True)
    off = [_distance(one, two) for one, two in pairs]
    return [
        Gradient(name, own / size, each / size)
        for name, own, each in zip(names, sizes, off, strict=True)
    ]


def _distance(one: Tensor | None, other: Tensor | None) -> float:
    if one is None or other is None:
        return sum(float(each.norm()) for each in (one, other) if each is not None)
    return float((one - other).norm())


def _off(apart: list[Gradient]) -> float:
    return sum(each.off**2 for each in apart) ** 0.5
