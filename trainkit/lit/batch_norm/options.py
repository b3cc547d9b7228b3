"""The names of the policies, and which options belong to which."""

from __future__ import annotations

import numbers
from typing import Any, Literal, get_args

from trainkit.errors import TrainkitError

PolicyName = Literal[
    "warn",
    "error",
    "ignore",
    "exact",
    "freeze",
    "momentum",
    "recalibrate",
    "sync",
    "group_norm",
    "renorm",
]

LEAST = {
    "min_samples": 1,
    "num_batches": 1,
    "groups": 1,
    "r_max": 1,
    "d_max": 0,
    "ramp_steps": 0,
}
LIMITS = ("r_max", "d_max")  # they need not be whole numbers

# The options that belong to one policy, with their defaults.
OWN: dict[str, dict[str, Any]] = {
    "exact": {"memory": "auto"},
    "freeze": {"freeze_affine": False},
    "recalibrate": {"num_batches": 200, "exact": True, "forward": None},
    "group_norm": {"groups": 32},
    "renorm": {"r_max": 3.0, "d_max": 5.0, "ramp_steps": 1000},
}


def check_options(policy: str, **options: Any) -> None:
    """Check the arguments of `BatchNormGuard`.

    Raises:
        TrainkitError: there is no such policy, an option is not a number as it should
            be, or it belongs to another policy.
    """
    if policy not in get_args(PolicyName):
        raise TrainkitError(
            f"BatchNormGuard policy: must be one of {list(get_args(PolicyName))}, "
            f"received {policy!r}."
        )
    for name, least in LEAST.items():
        value = options[name]
        kind = numbers.Real if name in LIMITS else numbers.Integral
        if not isinstance(value, kind) or not float(value) >= least:  # NaN is refused
            whole = "" if name in LIMITS else "whole "
            raise TrainkitError(
                f"BatchNormGuard {name}: must be a {whole}number of at least {least}, "
                f"received {value!r}."
            )
    for owner, defaults in OWN.items():
        for name, default in defaults.items():
            if owner != policy and options[name] != default:
                raise TrainkitError(
                    f"BatchNormGuard {name}: it belongs to the policy {owner!r}, and "
                    f"the policy is {policy!r}. Leave it out, or take that policy."
                )
