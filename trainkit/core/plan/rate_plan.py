"""Planned learning rates over optimizer steps."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class RatePlan:
    """The rates that were planned when a training began.

    Attributes:
        steps: optimizer steps, counted from 0.
        rates: the rate at each of these steps, by the name under which it is logged.
        why_not: the reason, if there is no plan.
        unit: what the weights of windows count; empty if it has no name.
        optimizers: with several optimizers, the name of each by the beginnings of its
            columns.
    """

    steps: list[float] = field(default_factory=list)
    rates: dict[str, list[float]] = field(default_factory=dict)
    why_not: str = ""
    unit: str = ""
    optimizers: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of_json(cls, found: Any) -> RatePlan:
        """Read a plan from parsed JSON.

        >>> RatePlan.of_json({"steps": [0], "rates": {"lr": [0.1]}}).rates
        {'lr': [0.1]}
        >>> RatePlan.of_json(None).why_not
        'none was written down'
        """
        if found is None:
            return cls(why_not="none was written down")
        damaged = cls(why_not="what was written down is damaged")
        try:
            plan = cls(**found)
            lengths = {len(plan.steps), *map(len, plan.rates.values())}
            _ = [float(n) for each in (plan.steps, *plan.rates.values()) for n in each]
            _ = "".join([plan.unit, *plan.optimizers, *plan.optimizers.values()])
        except (TypeError, ValueError, AttributeError):
            return damaged
        return plan if len(lengths) == 1 else damaged

    def from_step(self, step: float, later: RatePlan) -> RatePlan:
        """This plan before a step, followed by a later one.

        >>> one = RatePlan([0, 1, 2], {"lr": [3.0, 2.0, 1.0]})
        >>> one.from_step(1, RatePlan([1, 2], {"lr": [9.0, 8.0]})).rates
        {'lr': [3.0, 9.0, 8.0]}
        """
        if later.why_not or self.rates.keys() != later.rates.keys():
            return later
        kept = bisect_left(self.steps, step)
        rates = {
            name: self.rates[name][:kept] + later.rates[name] for name in later.rates
        }
        return replace(later, steps=self.steps[:kept] + later.steps, rates=rates)
