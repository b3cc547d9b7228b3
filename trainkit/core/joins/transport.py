"""Where tensors wait until they are needed again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from torch import Tensor

from trainkit.core.inside.moment import version_of
from trainkit.errors import TrainkitError

Kept = Any
"""A tensor that waits, as its transport knows it."""


class Transport(Protocol):
    """Keeps tensors and gives them back."""

    def put(self, tensor: Tensor) -> Kept:
        """Keep a tensor, which nobody may change any more."""

    def get(self, kept: Kept) -> Tensor:
        """The tensor; nobody may change it. Each may be had several times."""
        ...

    def fetch(self, kept: Iterable[Kept]) -> None:
        """Say that these are wanted next."""


class OnDevice:
    """Keeps tensors where they are."""

    def put(self, tensor: Tensor) -> Kept:
        return tensor, version_of(tensor)

    def get(self, kept: Kept) -> Tensor:
        tensor, version = kept
        check_unchanged(tensor, version)
        return tensor

    def fetch(self, kept: Iterable[Kept]) -> None:
        pass


def check_unchanged(tensor: Tensor, version: int) -> None:
    """Refuse a tensor that was changed in place since it had some version."""
    if version_of(tensor) != version:
        raise TrainkitError(
            f"exact BatchNorm: a tensor of shape {list(tensor.shape)} that a later "
            f"layer or the backward pass needs was changed in place. Leave out "
            f"inplace=True where its input is used again."
        )
