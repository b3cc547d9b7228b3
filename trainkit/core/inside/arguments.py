"""The arguments of a call of a module."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from inspect import Parameter
from typing import Any

import torch
from torch import Tensor


@dataclass
class Arguments:
    """The arguments of a call, taken apart.

    Attributes:
        run: the module's own forward, on a list of values.
        values: the arguments.
        paths: of them, as a user writes them.
        shared: the indices of those that every chunk gets whole.
        rows: how many rows they have.
    """

    run: Callable[[list[Any]], Any]
    values: list[Any]
    paths: list[str]
    shared: set[int]
    rows: int

    @property
    def devices(self) -> set[torch.device]:
        return {each.device for each in self.values if isinstance(each, Tensor)}


def argument_names(function: Any) -> list[str]:
    """The names of a function's positional arguments."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    by_place = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    return [each.name for each in parameters if each.kind in by_place]
