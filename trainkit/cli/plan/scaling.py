"""The scaling rules applied to a rate and to Adam's moments, for `trainkit plan`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from trainkit.core.plan.effective_batch import BatchPlan
from trainkit.core.plan.scaling import (
    RULES,
    ScalingRule,
)
from trainkit.errors import TrainkitError

BY_NOISE = "gain"
"""The rule that goes by the noise scale: its rates stand in the table of windows."""
BETAS = (0.9, 0.999)
EPS = 1e-8


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Good hyperparameters, and the batch for which they were found.

    Attributes:
        batch: the effective batch.
        lr: the learning rate.
        betas: Adam's.
        eps: Adam's.

    Raises:
        TrainkitError: a number is out of its range.
    """

    batch: int
    lr: float
    betas: tuple[float, ...] = BETAS
    eps: float = EPS

    def __post_init__(self) -> None:
        for name in ("batch", "lr", "eps"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                option = "reference" if name == "batch" else name
                raise TrainkitError(
                    f"trainkit plan --{option}: must be a positive number, received "
                    f"{value!r}."
                )
        for beta in self.betas:
            if not 0 < beta < 1:
                raise TrainkitError(
                    f"trainkit plan --betas: must be above 0 and below 1, received "
                    f"{beta!r}."
                )


def scaled_by_rules(
    plan: BatchPlan, reference: Reference, *, rule: str | None
) -> list[dict[str, Any]]:
    """The hyperparameters for a plan's batch, by one rule or by each.

    Args:
        plan: the plan.
        reference: the hyperparameters and their batch.
        rule: the only rule of interest, or None for all.

    Returns:
        For each rule its name, k and the new values; `None` for a value that does not
        change. A rule that cannot be applied has a `problem` and no rate. The rule
        gain is not among them: it needs the noise scale and depends on the optimizer.

    Raises:
        TrainkitError: the only rule of interest cannot be applied.
    """
    if rule == BY_NOISE:
        return []
    if rule is not None:
        return [_scaled(RULES[rule], plan, reference)]
    return [_scaled_or_problem(each, plan, reference) for each in RULES.values()]


def _scaled_or_problem(
    rule: ScalingRule, plan: BatchPlan, reference: Reference
) -> dict[str, Any]:
    try:
        return _scaled(rule, plan, reference)
    except TrainkitError as error:
        k = plan.effective_batch.over(reference.batch)
        nothing = dict.fromkeys(("lr", "beta1", "beta2", "eps"))
        return {"rule": rule.name, "k": k, **nothing, "problem": str(error)}


def _scaled(rule: ScalingRule, plan: BatchPlan, reference: Reference) -> dict[str, Any]:
    k = plan.effective_batch.over(reference.batch)
    beta1, beta2 = reference.betas
    rule.check_reach(beta1, beta2, k)
    return {
        "rule": rule.name,
        "k": k,
        "lr": plan.scaled_rate(
            reference.lr, reference_batch=reference.batch, rule=rule.name
        ),
        "beta1": rule.beta1(beta1, k) if rule.beta1 else None,
        "beta2": rule.beta2(beta2, k) if rule.beta2 else None,
        "eps": rule.eps(reference.eps, k) if rule.eps else None,
        "problem": None,
    }
