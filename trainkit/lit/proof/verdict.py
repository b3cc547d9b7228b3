"""What counts as exact, and the option of the proof."""

from __future__ import annotations

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
