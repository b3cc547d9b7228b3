"""The functions of torch: what each may do to values, and how a recorder sees all."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

ASKED = frozenset(
    """
    shape size dim ndim ndimension dtype device layout numel nelement stride itemsize
    element_size nbytes get_device is_floating_point is_complex is_signed is_contiguous
    is_cuda is_cpu is_mps is_xpu is_meta is_sparse is_sparse_csr is_quantized is_nested
    is_mkldnn is_conj is_neg is_inference is_same_size is_pinned storage_offset
    result_type can_cast
    """.split()
)
"""What Python may ask of a value."""

SIZED = frozenset(
    """
    view reshape expand broadcast_to zeros ones empty rand randn repeat unflatten
    new_zeros new_ones new_empty tile
    """.split()
)
"""The functions to which a number of rows may be given."""

LIKE = frozenset("to type_as new_zeros new_ones new_empty new_full new_tensor".split())
"""Functions that take no more than type and device of a value, if there are no rows in
what they return."""

OF_GRAPH = frozenset(
    """
    register_hook retain_grad backward grad detach_ requires_grad_ data.__set__ set_
    """.split()
)
"""Functions of gradients."""

NO_TENSOR = (
    "it returns no tensor, and Python may know of a value no more than its shape, type "
    "and device. Use torch.where() in place of an if, and x.shape[0] in place of len(x)"
)


def why_not(function: Any, name: str, parts: list[Any], *, has_rows: bool) -> str:
    """Why a function cannot be repeated, given these parts; empty if it may be."""
    if name in OF_GRAPH:
        return "gradients are not to be had where chunks run again"
    if has_rows and name not in SIZED:
        return "it gets the number of rows, which is a chunk's"
    if any(isinstance(each, torch.Generator) for each in parts):
        return "with generator=, each chunk would continue its draws"
    if function in (torch.batch_norm, torch.native_batch_norm):
        return "only functional.batch_norm sees all chunks"
    given = (x for x in parts if not isinstance(x, type | torch.Tensor))
    if name.endswith(".apply") and any(map(callable, given)):
        return (
            "it gets a function or a module, whose weights it does not show. For "
            "checkpoint() use use_reentrant=False"
        )
    return ""


def name_of(function: Any) -> str:
    """The name of a function, method or attribute of torch."""
    name = getattr(function, "__name__", str(function))
    if name in ("__get__", "__set__", "__delete__"):
        of = getattr(getattr(function, "__self__", None), "__name__", "attribute")
        return of if name == "__get__" else f"{of}.{name}"
    return name


def written_by(name: str, args: Any, kwargs: Any) -> Any:
    """The arguments of a call into which it may write."""
    is_method = name.endswith("_") and not name.endswith("__")
    if is_method or name == "__setitem__" or kwargs.get("inplace") is True:
        return args[:1] or [*kwargs.values()][:1]
    return kwargs.get("out", ())


_ARGUMENTS = inspect.signature(F.batch_norm)
_OF_SYNC = "input weight bias running_mean running_var eps momentum group".split()


def norm_of(function: Any, name: str, args: Any, kwargs: Any) -> Any:
    """The arguments of a call that normalises by the batch; None for other calls."""
    if name == "SyncBatchNorm.apply":
        return SimpleNamespace(**dict(zip(_OF_SYNC, args, strict=False)))
    if function is not F.batch_norm:
        return None
    given = _ARGUMENTS.bind(*args, **kwargs)
    given.apply_defaults()
    is_training = given.arguments["training"]
    return SimpleNamespace(group=None, **given.arguments) if is_training else None


# ---- watching ------------------------------------------------------------------------

_LOCK, _THREAD = threading.Lock(), threading.local()
_APPLY: Any = vars(torch.autograd.Function)["apply"]
_num_open = 0


def is_recording() -> bool:
    """Whether a forward of this thread is written down."""
    return getattr(_THREAD, "recorder", None) is not None


@contextlib.contextmanager
def recording(recorder: Any) -> Iterator[None]:
    """Within it, a recorder sees the functions of torch, and `apply` of a
    `torch.autograd.Function`, which torch does not show it.

    Args:
        recorder: which writes them down.
    """
    global _num_open
    with _LOCK:
        _num_open += 1
        torch.autograd.Function.apply = classmethod(_apply)  # type: ignore[assignment]
    _THREAD.recorder = recorder
    try:
        with recorder:
            yield
    finally:
        _THREAD.recorder = None
        with _LOCK:
            _num_open -= 1
            if not _num_open:
                torch.autograd.Function.apply = _APPLY


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands for `apply` while forwards are written down."""
    original: Any = functools.partial(_APPLY.__func__, cls)
    recorder: Any = getattr(_THREAD, "recorder", None)
    if recorder is None or recorder.is_within:
        return original(*args, **kwargs)
    original.__name__ = f"{cls.__name__}.apply"
    return recorder.__torch_function__(original, (), args, kwargs)
