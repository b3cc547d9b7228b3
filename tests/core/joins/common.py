"""The ways in which a module with shared statistics runs."""

from __future__ import annotations

from typing import Any

from torch import nn

from tests.core.tape.common import gradients, off_by, state, summed

__all__ = [
    "EXACT",
    "check_clean",
    "engines_of",
    "gradients",
    "off_by",
    "state",
    "summed",
]

EXACT = 1e-10
"""How far a gradient may be from the big batch's, in float64."""


def engines_of(net: Any) -> list[Any]:
    """Of the modules that were called."""
    return net._joined.engines


def check_clean(net: nn.Module) -> None:
    """Nothing stays in a module."""
    for name, each in net.named_modules():
        assert "forward" not in vars(each), name
        assert not each._forward_hooks, name
        assert not each._forward_pre_hooks, name
