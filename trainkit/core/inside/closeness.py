"""Whether values differ by no more than rounding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainkit.core.gradients import HALF

ROUNDING, HALF_ROUNDING = 1024, 8
"""Runs of the same rows beside others may differ by so many units in the last place of
the largest entry; by fewer in half precision, in which a layer rounds only what it
returns."""

ON_DEVICE = 2**-18
"""The least unit of a device, whose kernels may round products to few digits (TF32)."""

OUTLIER = 1e6
"""Entries of this size, such as those of a mask, do not say what rounding is, where a
tenth of all is far smaller."""


def are_equal(value: Any, other: Any) -> bool:
    """Whether two values that are no tensors are the same."""
    if value is other:
        return True
    try:
        return type(value) is type(other) and bool(value == other)
    except Exception:
        return False


def are_close(value: Tensor, other: Tensor, *, eps: float = 0.0) -> bool:
    """Whether two tensors differ by no more than rounding; waits for the device.

    Args:
        value: a tensor.
        other: another.
        eps: the unit in the last place, if something within was coarser.
    """
    if value.shape != other.shape or value.dtype != other.dtype:
        return False
    if not (value.is_floating_point() or value.is_complex()) or not value.numel():
        return torch.equal(value, other)
    wide = torch.promote_types(value.dtype, torch.float32)
    one, two = (torch.nan_to_num(x.detach().to(wide)) for x in (value, other))
    found, sizes = torch.finfo(value.dtype), one.abs()
    small = sizes.flatten().kthvalue(sizes.numel() // 10 + 1).values
    limit = (1e4 * small).clamp_min(min(OUTLIER, found.max / 9))
    usual = sizes.where(sizes < limit, 0).max()
    usual = usual.where(usual > 0, sizes.max())
    least = 0.0 if value.device.type == "cpu" else ON_DEVICE
    allowed = max(
        (HALF_ROUNDING if value.dtype in HALF else ROUNDING) * max(found.eps, least),
        HALF_ROUNDING * eps,
    )
    return not ((one - two).abs() > sizes.maximum(usual) * allowed).any()


def apart(found: Sequence[Tensor | None], wanted: Sequence[Tensor | None]) -> float:
    """How far tensors are from others, as a share of their size; None is 0."""
    if len(found) != len(wanted):
        return torch.inf
    squares = sizes = 0.0
    for one, other in zip(found, wanted, strict=True):
        if one is not None and other is not None and one.shape != other.shape:
            return torch.inf
        first, second = (
            0.0 if x is None else torch.nan_to_num(x.detach().to(_wide(x)))
            for x in (one, other)
        )
        difference: Any = first - second
        if isinstance(difference, Tensor):
            squares += float(difference.abs().square().sum())
        if isinstance(second, Tensor):
            sizes += float(second.abs().square().sum())
    return (squares / sizes) ** 0.5 if sizes else squares and torch.inf


def _wide(value: Tensor) -> torch.dtype:
    return torch.complex128 if value.is_complex() else torch.float64
