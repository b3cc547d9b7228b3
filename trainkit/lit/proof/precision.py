"""What a run's own half precision loses, which no strategy can give back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainkit.core.gradients import HALF
from trainkit.core.proof.gradients import share_of, weighted
from trainkit.core.strategies import Strategies
from trainkit.lit._compat import scaler_of
from trainkit.lit.measure.passes import Passes
from trainkit.lit.proof.findings import Cut
from trainkit.lit.proof.measure import Measurements

MOST_ALONE = 0.3
"""More is no rounding: the pass has taken another branch, or drawn other numbers."""


def half_precision(trainer: Any) -> str:
    """The name of the Trainer's precision if its arithmetic is narrower than float32;
    otherwise nothing."""
    name = str(trainer.precision)
    return name if name.startswith(("16", "bf16", "transformer-engine")) else ""


def in_own_precision(
    module: Any, strategies: Strategies, wide: Measurements
) -> tuple[Cut | None, str]:
    """The window and the whole in the run's own precision, and a note.

    What they are apart is rounding, if they agree in wider arithmetic.

    Args:
        module: in `fit`.
        strategies: by term.
        wide: the measurements in wider arithmetic.
    """
    trainer = module.trainer
    name = half_precision(trainer)
    passes = Passes(module, wide.rows.num_rows, dtype=None, strategies=strategies)
    passes.beside = wide.passes.beside
    passes.coordinates = wide.passes.coordinates
    scaler = scaler_of(trainer)
    if scaler is not None:
        passes.scale = float(scaler.get_scale())
    try:
        with passes.prepared():
            found = Measurements(passes, wide.rows, parts=wide.parts)
            dtype = _dtype_of_sum(module)
            off = _off_by(found, strategies, dtype)
    except Exception as error:
        return None, f"training_step could not be compared in {name}: {error}"
    alone = share_of(found.whole.gradient - wide.first.gradient, wide.first.gradient)
    note = ""
    if alone < MOST_ALONE:
        note = f"where one batch by itself is off by {alone:.1e}"
    advice = (
        f"in {name} gradients are added up in half precision; wide_gradients=True adds "
        f"them up in float32"
    )
    sizes = tuple(len(rows) for rows in wide.parts)
    return Cut(f"in {name}", sizes, off, note), advice if dtype in HALF else ""


def _dtype_of_sum(module: Any) -> torch.dtype:
    """The dtype in which the window's gradient is added up."""
    kinds = {p.dtype for p in module.parameters() if p.requires_grad}
    wide = getattr(module, "wide_gradients", False)
    return kinds.pop() if len(kinds) == 1 and wide is not True else torch.float32


def _off_by(found: Measurements, strategies: Strategies, dtype: torch.dtype) -> float:
    """How far the window is from the whole, added up as the run does."""
    make, parts = found.rows.as_run, found.parts
    each = torch.zeros(len(parts), len(found.whole.gradient), dtype=torch.float64)
    for name, measured in found.terms(parts, make).items():
        weights = found.weights(name, strategies, parts, make)
        each += weighted(measured.parts, weights)
    window = torch.zeros_like(found.whole.gradient)
    for gradient in each:
        window = _rounded(window + _rounded(gradient, dtype), dtype)
    return share_of(window - found.whole.gradient, found.whole.gradient)


def _rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    return values.to(dtype).double()
