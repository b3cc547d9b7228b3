"""Planned learning rates over optimizer steps."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class RatePlan:
    """The rates that were planned when a training began.

    Attributes:
        steps: optimizer steps, counted from 0.
        rates: the rate at each of these steps, by the name under which it is logged.
        why_not: the reason, if there is no plan.
    """

    steps: list[float] = field(default_factory=list)
    rates: dict[str, list[float]] = field(default_factory=dict)
    why_not: str = ""
