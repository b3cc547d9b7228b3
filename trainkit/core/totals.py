"""Numbers and totals as float64 tensors on the device, without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from trainkit.core.strategies import Weight


def vector(numbers: Sequence[Weight], device: torch.device) -> Tensor:
    """Numbers and 0-d tensors as one float64 vector; does not wait for any of them."""
    dtype = totals_dtype(device)
    devices = {n.device if isinstance(n, Tensor) else None for n in numbers}
    if len(devices) > 1:
        return torch.stack([scalar(number, device) for number in numbers])
    if numbers and None not in devices:
        return torch.stack(cast(list[Tensor], numbers)).to(device, dtype)
    if device.type != "cuda":
        return torch.tensor(numbers, dtype=dtype, device=device)
    host = torch.tensor(numbers, dtype=dtype, pin_memory=True)
    return host.to(device, non_blocking=True)


def scalar(number: Weight, device: torch.device) -> Tensor:
    """A number as a float64 0-d tensor, filled on the device rather than copied."""
    dtype = totals_dtype(device)
    if isinstance(number, Tensor):
        return number.detach().reshape(()).to(device, dtype)
    return torch.full((), number, dtype=dtype, device=device)


def totals_dtype(device: torch.device) -> torch.dtype:
    """float64, which counts exactly to 2^53; float32 on Apple's GPUs, which lack it."""
    return torch.float32 if device.type == "mps" else torch.float64


def default_device() -> torch.device:
    """The device for exchanges between ranks, if nothing else shows one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
