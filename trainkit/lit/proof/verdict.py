"""What a proof has found, its option, and the line that says it."""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import shorten
from typing import Any, Literal, get_args

import torch

from trainkit.errors import TrainkitError

Proof = Literal["warn", "require", "off"]

MOST_ROUNDING = {torch.float64: 1e-8, torch.float32: 1e-5}
"""The largest deviation that is rounding. Exact modules were off by at most 3e-7 in
float32 and 1e-13 in float64; a balance term of experts by 9e-5."""

ALARM = {torch.float64: 1e-8, torch.float32: 1e-4}
"""What is certainly more than rounding."""

SURELY_ROUNDING = 5e-6
"""In float32, what is above this is measured again in float64."""


class NotMeasured(Exception):  # nothing is wrong
    """A rehearsal was not possible; the text says why."""


def checked_proof(proof: Any) -> Proof:
    """The option; YAML reads a bare `off` as false."""
    if proof in (False, "False"):
        return "off"
    if proof not in get_args(Proof):
        raise TrainkitError(
            f'proof: must be "warn", "require" or "off", received {proof!r}.'
        )
    return proof


def in_one_line(error: BaseException) -> str:
    """The first sentence of an error, in whole words."""
    first = str(error).strip().split("\n")[0].split(". ")[0].rstrip(".")
    said = shorten(first, 200, placeholder=" ...")
    if isinstance(error, NotMeasured | TrainkitError):
        return said
    return f"{type(error).__name__}: {said}"


@dataclass(frozen=True)
class Verdict:
    """What was measured at the start of a run.

    Attributes:
        off: how far the window's gradient is from the big batch's, as a share of its
            size; None if nobody could measure it.
        num_rows: how many rows were used.
        dtype: of the arithmetic in which it was measured.
        left_out: what the rehearsal had to leave out.
        doubt: why an exact measurement does not tell enough; "" if it does.
        cause: why it is not exact, or why nothing was measured.
    """

    off: float | None
    num_rows: int = 0
    dtype: torch.dtype = torch.float32
    left_out: tuple[str, ...] = ()
    doubt: str = ""
    cause: str = ""

    @property
    def is_measured(self) -> bool:
        return self.off is not None and not self.doubts

    @property
    def doubts(self) -> str:
        """Why this is neither exact nor off; "" if it is one of them."""
        if self.off is None or self.is_off:
            return ""
        if self.off > MOST_ROUNDING[self.dtype]:
            return (
                f"off by {self.off:.0e} in float32, which may be more than rounding, "
                f"and the step does not run in float64"
            )
        return self.doubt

    @property
    def is_off(self) -> bool:
        """Whether the window is not the big batch."""
        return self.off is not None and self.off > ALARM[self.dtype]

    @property
    def text(self) -> str:
        """The verdict in one line."""
        if self.off is None:
            return f"not measured: {self.cause}"
        rows = f"on {self.num_rows} of your rows"
        if self.is_off:
            return (
                f"a window of this training is not the big batch: {rows}, its gradient "
                f"is off by {self.off:.2g} of its size. {self.cause}"
            )
        if self.doubts:
            return f"not measured: {self.doubts}"
        precision = str(self.dtype).removeprefix("torch.")
        without = f"; left out: {', '.join(self.left_out)}" if self.left_out else ""
        return f"exact {rows}: off by {self.off:.0e} in {precision}{without}"
