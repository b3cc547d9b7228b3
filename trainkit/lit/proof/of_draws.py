"""Causes that are draws of random numbers, each with what to do about it."""

from __future__ import annotations

from collections.abc import Sequence

from trainkit.lit.proof.events import Located
from trainkit.lit.proof.findings import Cause
from trainkit.lit.proof.remedies import INSIDE

RANDOMNESS = "randomness"


def of_sampling(unlike: Sequence[str]) -> Cause:
    return Cause(
        RANDOMNESS,
        ", ".join(unlike),
        "training_step draws across the rows of the batch: a micro-batch draws among "
        "its own rows only",
        (
            "draw in the data set or the collate function, for each row by itself",
            f"or {INSIDE}",
        ),
    )


def of_unlike_draws(lines: Sequence[str], located: Located) -> Cause:
    """Draws that cannot be replayed by row stand between the parts and the whole."""
    where = f", first in {located.path}" if located.path else ""
    return Cause(
        RANDOMNESS,
        ", ".join(lines),
        f"a part of the batch draws other numbers than its rows get in the whole, and "
        f"they cannot be replayed by row; outputs or the loss differ{where}. What else "
        f"differs cannot be seen behind it",
        ("draw for each row by itself, or in the data set, for the check at least",),
        hides=True,
    )


def of_other_draws(off: float, lines: Sequence[str]) -> Cause:
    return Cause(
        RANDOMNESS,
        ", ".join(lines),
        f"two passes over the same rows differ by {off:.1e}, so nothing can be "
        f"compared: training_step draws numbers whose generator is not known here",
        ("draw with torch, or take out these draws for the check",),
        hides=True,
    )
