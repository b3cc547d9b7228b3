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
    "group_norm",
]

ELSEWHERE = {
    "sync": "Lightning does it: Trainer(sync_batchnorm=True)",
    "renorm": "Batch Renormalization is no longer part of trainkit; take 'group_norm', "
    "or 'exact', which needs no correction",
}
"""Where to go for what was a policy, or might be taken for one."""

LEAST = {
    "min_samples": 1,
    "num_batches": 1,
    "groups": 1,
}

# The options that belong to one policy, with their defaults.
OWN: dict[str, dict[str, Any]] = {
    "exact": {"memory": None},
    "freeze": {"freeze_affine": False},
    "recalibrate": {"num_batches": 200, "exact": True, "forward": None},
    "group_norm": {"groups": 32},
}


def check_options(policy: str, **options: Any) -> None:
    """Check the arguments of `BatchNormGuard`.

    Raises:
        TrainkitError: there is no such policy, an option is not a number as it should
            be, or it belongs to another policy.
    """
    if policy in ELSEWHERE:
        raise TrainkitError(f"BatchNormGuard({policy!r}): {ELSEWHERE[policy]}.")
    if policy not in get_args(PolicyName):
        raise TrainkitError(
            f"BatchNormGuard policy: must be one of {list(get_args(PolicyName))}, "
            f"received {policy!r}."
        )
    for name, least in LEAST.items():
        value = options[name]
        if not isinstance(value, numbers.Integral) or value < least:
            raise TrainkitError(
                f"BatchNormGuard {name}: must be a whole number of at least {least}, "
                f"received {value!r}."
            )
    for owner, defaults in OWN.items():
        for name, default in defaults.items():
            if owner != policy and options[name] != default:
                raise TrainkitError(
                    f"BatchNormGuard {name}: it belongs to the policy {owner!r}, and "
                    f"the policy is {policy!r}. Leave it out, or take that policy."
                )
