"""No index below zero reaches a kernel.

Where rows count alike, some of their labels are ignored by a number below zero. What
does not know it would use it as an index: on a GPU, that ends the process's CUDA
context, and so the training; `ctc_loss` writes outside of its memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainkit.core._compat import transform

_FIRST = {F.embedding: "input", F.embedding_bag: "input", F.one_hot: "tensor"}
_SECOND = {
    F.cross_entropy: "target", F.nll_loss: "target", F.multi_margin_loss: "target",
    F.ctc_loss: "targets",
}  # fmt: skip
_THIRD = {
    getattr(owner, name + end): "index"
    for name in ("gather", "index_select", "scatter", "scatter_add", "index_add")
    for owner, end in ((torch, ""), (Tensor, ""), (Tensor, "_"))
    if hasattr(owner, name + end)
}
_NAMES = (_FIRST, _SECOND, _THIRD)
CHECKED = {Tensor.__getitem__, *_FIRST, *_SECOND, *_THIRD}
"""The functions that take indices."""

_IGNORES = {F.cross_entropy: 4, F.nll_loss: 4}
"""Where `ignore_index` stands, whose default is -100."""


def refuse_below_zero(func: Any, args: Any, kwargs: Any) -> None:
    """Refuse a call with an index below zero, or below what `x[index]` allows.

    Within a transform of torch.func nothing can be read, and so nothing is refused.

    Raises:
        IndexError: as torch itself on the CPU, for most functions.
    """
    if transform() is not None:
        return
    for indices, least in _indices_of(func, args, kwargs):
        is_whole = isinstance(indices, Tensor) and not (
            indices.is_floating_point() or indices.is_complex()
        )
        if not is_whole or indices.is_nested or not indices.numel():
            continue
        if func in _IGNORES:
            ignored = _argument(args, kwargs, _IGNORES[func], "ignore_index", -100)
            indices = indices.where(indices != ignored, 0)
        if int(indices.min()) < least:
            name = getattr(func, "__name__", "a function")
            raise IndexError(f"{name}: got an index below {least}")


def _indices_of(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, int]]:
    """The indices of a call, each with the least number that is allowed."""
    if func is Tensor.__getitem__:
        of, index = args
        for place, each in enumerate(index if isinstance(index, tuple) else (index,)):
            is_mask = isinstance(each, Tensor) and each.dtype == torch.bool
            if each is None or each is ... or is_mask or place == of.ndim:
                break  # what follows is of another dimension
            yield each, -of.shape[place]
    for place, names in enumerate(_NAMES):
        if func in names:
            yield _argument(args, kwargs, place, names[func]), 0


def _argument(
    args: Any, kwargs: Any, place: int, name: str, default: Any = None
) -> Any:
    return args[place] if len(args) > place else kwargs.get(name, default)
