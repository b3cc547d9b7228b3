"""Tensors that a pass writes to, put back as they were."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

NORMALISING = frozenset(("batch_norm", "instance_norm"))
SET_DATA: Any = Tensor.data.__set__  # type: ignore[attr-defined]
OUT_OF_SIGHT = frozenset("numpy __array__ data_ptr untyped_storage __dlpack__".split())
"""They hand out memory, to which anybody may write afterwards."""
EMBEDDINGS = frozenset(("embedding", "embedding_bag"))
"""They write to their weight where they have a `max_norm`."""


class PutBackWritten(TorchFunctionMode):
    """Keeps each tensor before the first write to it, and puts it back at the end.

    Nothing is copied that is not written to, so large models cost nothing. Every
    tensor is put back, also one that no module holds: `teacher.data.mul_(0.9)` is seen,
    and so are a batch that is changed in place and a parameter with other `data`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kept: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._replaced: list[tuple[Tensor, Tensor]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func == SET_DATA:
            self._replaced.append((args[0], args[0].detach()))
        elif name in OUT_OF_SIGHT or _writes(name):
            self._keep(args[:1])
        elif name in EMBEDDINGS:
            self._keep([*args, *kwargs.values()])
        elif name in NORMALISING:  # running statistics that no module holds
            self._keep(
                [args[1:3], kwargs.get("running_mean"), kwargs.get("running_var")]
            )
        if "out" in kwargs:
            self._keep(kwargs["out"])
        return func(*args, **kwargs)

    def put_back(self) -> None:
        """Put everything back, the last change first."""
        for tensor, data in reversed(self._replaced):
            tensor.data = data
        for storage, kept in self._kept.values():
            storage.copy_(kept)
        self._kept.clear()
        self._replaced.clear()

    def _keep(self, values: Any) -> None:
        for each in tree_leaves(values):
            if isinstance(each, Tensor) and each.layout is torch.strided:
                try:
                    storage = each.untyped_storage()
                except NotImplementedError:  # within vmap; it lives in this pass alone
                    continue
                if storage.data_ptr() not in self._kept:
                    self._kept[storage.data_ptr()] = storage, storage.clone()


def _writes(name: str) -> bool:
    """Whether a function of torch writes to its first argument, by its name."""
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name in IN_PLACE)
    return name.endswith("_") and name not in ("requires_grad_", "retain_grad_")


OPERATORS = "add sub mul truediv floordiv mod pow and or xor lshift rshift"
IN_PLACE = frozenset(f"__i{operator}__" for operator in OPERATORS.split())
