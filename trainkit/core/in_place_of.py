"""A module that stands for another one, with its parameters under the same names."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn

from trainkit.core.plan.options import check_whole_number
from trainkit.errors import TrainkitError

SHARED = (
    "_parameters",
    "_buffers",
    "_modules",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
"""What the two have in common."""

Own = TypeVar("Own", bound="InPlaceOf")


def check_cut(name: str, module: Any, size: Any) -> None:
    """Refuse what is no module, and a size of chunks that is no whole number.

    Args:
        name: of what cuts it.
        module: to be cut.
        size: the most rows in a chunk.
    """
    if not isinstance(module, nn.Module):
        raise TrainkitError(
            f"{name}: must be given a torch module, received {type(module).__name__}."
        )
    check_whole_number(f"{name} size", size)


class InPlaceOf(nn.Module):
    """Can be called in a module's place, and has its parameters and state.

    `remove`, or the end of a `with` block, gives the module its own forward back.

    Args:
        module: for which it stands.
        forward: what stands in place of its forward.
    """

    _stands_for: Any
    _forward: Any

    def __init__(self, module: nn.Module, forward: Any) -> None:
        super().__init__()
        vars(self)["_stands_for"] = module  # not a part of this one
        self._forward = forward
        forward.install()
        for held in SHARED:
            vars(self)[held] = vars(module)[held]
        self.training = module.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._stands_for(*args, **kwargs)

    def remove(self) -> None:
        """Give the module its own forward back."""
        self._forward.remove()

    def __enter__(self) -> nn.Module:
        return self._stands_for

    def __exit__(self, *error: Any) -> None:
        self.remove()

    def _save_to_state_dict(self, *args: Any) -> None:  # pyright: ignore
        self._stands_for._save_to_state_dict(*args)

    def _load_from_state_dict(self, *args: Any) -> None:  # pyright: ignore
        self._stands_for._load_from_state_dict(*args)

    def train(self: Own, mode: bool = True) -> Own:
        self.training = mode
        self._stands_for.train(mode)
        return self
