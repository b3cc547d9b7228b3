"""Shows a recorder all that runs in a forward."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import torch

from trainkit.core._compat import Looking
from trainkit.core.tape.names import Norm
from trainkit.core.tape.recorder import Recorder
from trainkit.core.tape.statistics import ranks_of

_LOCK, _THREAD = threading.Lock(), threading.local()
_APPLY: Any = vars(torch.autograd.Function)["apply"]
_num_open = 0


def is_recording() -> bool:
    """Whether a forward of this thread is written down."""
    return getattr(_THREAD, "recorder", None) is not None


@contextlib.contextmanager
def recording(recorder: Recorder, *, is_checked: bool) -> Iterator[None]:
    """Within it, a recorder sees the functions of torch, and `apply` of a
    `torch.autograd.Function`, which torch does not show it.

    Args:
        recorder: which writes them down.
        is_checked: whether operators that it does not see are refused.
    """
    global _num_open
    look = Looking(recorder.refuse_unseen) if is_checked else contextlib.nullcontext()
    with _LOCK:
        _num_open += 1
        torch.autograd.Function.apply = classmethod(_apply)  # type: ignore[assignment]
    _THREAD.recorder = recorder
    try:
        with look, recorder:
            yield
    finally:
        _THREAD.recorder = None
        with _LOCK:
            _num_open -= 1
            if not _num_open:
                torch.autograd.Function.apply = _APPLY


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands for `apply` while forwards are written down."""
    original = functools.partial(_APPLY.__func__, cls)
    recorder: Recorder | None = getattr(_THREAD, "recorder", None)
    if recorder is None or not recorder.sees(args, kwargs):
        return original(*args, **kwargs)
    name = f"{cls.__name__}.apply"
    if any(callable(each) and not isinstance(each, type) for each in args):
        recorder.refuse(
            name,
            "it gets a function or a module, whose weights it does not show. For "
            "checkpoint() use use_reentrant=False",
        )
    if cls.__name__ == "SyncBatchNorm":
        x, weight, bias, mean, var, eps, momentum, group, *_ = args
        norm = Norm(x, mean, var, weight, bias, momentum, eps)
        return recorder.meet(norm, ranks_of(group))
    return recorder.record(original, name, args, kwargs)
