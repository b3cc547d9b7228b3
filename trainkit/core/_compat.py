"""What torch keeps to itself and the core must know. Each function has a test."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule


def gradient_divide_factors(module: nn.Module) -> set[float | None]:
    """By what FSDP2 divides summed gradients; None is the number of ranks.

    `set_gradient_divide_factor` sets it, and nothing public tells it.
    """
    states: list[Any] = [
        m._get_fsdp_state() for m in module.modules() if isinstance(m, FSDPModule)
    ]
    groups = [group for state in states for group in _groups(state)]
    return {getattr(group, "gradient_divide_factor", None) for group in groups}


def _groups(state: Any) -> list[Any]:
    """Several groups in a module since torch 2.12, one before."""
    several = getattr(state, "_fsdp_param_groups", None)
    if several is not None:
        return several
    return [group] if (group := state._fsdp_param_group) is not None else []
