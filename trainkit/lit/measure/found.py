"""What the proof at the beginning of a run has found, and its option."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from trainkit.errors import TrainkitError

Proof = Literal["warn", "require", "off"]

SURE, MOST = 3e-6, 2e-4
"""In float32, exact modules were off by up to 3e-6, and others by 1e-3 and more. What
lies between is measured in float64."""

LEAST = 3e-5
"""Without float64, less is never an alarm."""

DOUBTFUL = 1e-5
"""Without float64, more is not called exact if it is ten times what rounding does."""

MOST_IN_FLOAT64 = 1e-6
"""Some arithmetic may stay in float32."""


def checked_proof(proof: Any) -> Proof:
    """The option; YAML reads a bare `off` as false."""
    if proof in (False, "False"):
        return "off"
    if proof not in get_args(Proof):
        raise TrainkitError(
            f'proof: must be "warn", "require" or "off", received {proof!r}.'
        )
    return proof


@dataclass(frozen=True)
class Found:
    """What was measured at the beginning of a run.

    Attributes:
        off: how far the window's gradient is from the whole's, as a share of its size.
        off_in_loss: how far its loss is.
        rounding: how far a gradient moves when rows change their order; None if there
            were too few rows to see it.
        most: the largest deviation that counts as rounding.
        num_rows: how many rows were used.
        cause: why it is not exact, in one sentence.
        in_float64: how far the gradient is in float64; None where that was not needed,
            or could not be measured.
        are_padded: whether rows of unlike length were padded alike.
    """

    off: float
    off_in_loss: float
    rounding: float | None
    most: float
    num_rows: int
    cause: str = ""
    in_float64: float | None = None
    are_padded: bool = False

    @property
    def is_open(self) -> bool:
        """Whether float32 cannot tell rounding from a small cause."""
        return sure(self.rounding) < self.off <= MOST

    @property
    def is_doubtful(self) -> bool:
        """Whether it may be more than rounding, and float64 could not decide."""
        known = sure(self.rounding)
        return self.in_float64 is None and self.off > max(DOUBTFUL, known)

    def decided(self, in_float64: float, cause: str) -> Found:
        """What float64 says, and why if it is not exact."""
        is_rounding = in_float64 <= MOST_IN_FLOAT64
        most = self.off if is_rounding else sure(self.rounding)
        return replace(self, most=most, cause=cause, in_float64=in_float64)


def sure(rounding: float | None) -> float:
    """The largest deviation in float32 that is certainly rounding."""
    return max(SURE, 10 * (rounding or 0.0))


def most_of(rounding: float | None) -> float:
    """The largest deviation in float32 that is taken for rounding."""
    return MOST if rounding is None else max(LEAST, min(30 * rounding, MOST))


def exact_text(found: Found, off: float) -> str:
    """The line of a run that is exact; `off` is the largest of all ranks."""
    beside = "" if found.rounding is None else f" (rounding {found.rounding:.0e})"
    if found.in_float64 is not None:
        beside = f" in float32, and by {found.in_float64:.0e} in float64"
    loss = ""
    if found.off_in_loss > MOST:
        loss = f"; the loss's value is off by {found.off_in_loss:.1g}, its gradient not"
    rows = f"{found.num_rows} of your rows{', padded alike' * found.are_padded}"
    return f"exact on {rows}: off by {off:.0e}{beside}{loss}"


def doubtful_text(found: Found, off: float) -> str:
    """The line of a run of which float64 could not decide."""
    return (
        f"off by {off:.0e} on {found.num_rows} of your rows, which may be more than "
        f"rounding; trainkit.check measures more of them"
    )


def not_exact_text(found: Found, off: float) -> str:
    """The warning of a run that is not."""
    cause = found.cause or "It was found on another rank."
    return (
        f"a window of this training is not the big batch. On {found.num_rows} "
        f"rows of the first batch, cut in two, its gradient is off by {off:.2g} of its "
        f"size. {cause} trainkit.check(module, data) names the place and the remedy, "
        f"and so does `trainkit check`, before the words of your command."
    )
