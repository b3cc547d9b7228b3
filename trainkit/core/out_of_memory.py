"""Recognising errors that mean out of memory, and freeing the memory they hold.

torch raises `torch.OutOfMemoryError` for the caching allocators of accelerators. All
other kinds raise a plain RuntimeError, which only its text shows: see `WORDS`.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

Found = TypeVar("Found")

WORDS = (
    "out of memory",  # allocators of devices, their drivers, Triton
    "can't allocate memory",  # the CPU's allocator; on Windows in the next words
    "not enough memory",
    "alloc_failed",  # libraries that could not allocate their workspace
    # cuDNN, where no algorithm fits in what is left (pytorch#4107).
    "cudnn_status_not_supported",
    "unable to find a valid cudnn algorithm",
    "unable to find an engine",
)
"""What texts of RuntimeErrors have, in lower case, that mean out of memory."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out, on a device or on the host.

    An error raised *from* such an error counts too (`torch.compile` and loaders wrap
    what they catch). A collective that ran out of memory does not: its group is
    broken, and less work does not mend it.

    >>> is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    True
    >>> is_out_of_memory(RuntimeError("mat1 and mat2 must have the same dtype"))
    False
    """
    return any(_ran_out(one) for one in _led_to(error, "__cause__"))


def release(error: BaseException) -> None:
    """Free the tensors that an error's traceback holds in the frames that failed.

    The error keeps its type and text, and so do the errors that led to it. The device's
    cached blocks are given back too, so that other sizes find room.
    """
    for one in _led_to(error, "__cause__", "__context__"):
        traceback.clear_frames(one.__traceback__)
        one.__traceback__ = None
    gc.collect()
    if not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.empty_cache()
    except RuntimeError as at_emptying:  # which can itself run out of memory
        if not is_out_of_memory(at_emptying):
            raise


def makes_room(error: Exception, make_smaller: Callable[[], bool]) -> bool:
    """Answer an error that means out of memory: free what the attempt has held.

    Args:
        error: that an attempt has raised.
        make_smaller: lets the next one take less memory; returns False if none can.

    Returns:
        Whether to begin again. Else the error is to be raised.
    """
    if not (is_out_of_memory(error) and make_smaller()):
        return False
    release(error)
    return True


def in_smaller_parts(
    attempt: Callable[[], Found],
    make_smaller: Callable[[], bool],
    put_back: Callable[[], object],
) -> Found:
    """What an attempt gives; where memory runs out it begins again, in smaller parts.

    Args:
        attempt: what is tried.
        make_smaller: lets the next one take less memory; returns False if none can.
        put_back: makes all as it was before the attempt.
    """
    while True:
        try:
            return attempt()
        except Exception as error:
            if not makes_room(error, make_smaller):
                raise
        put_back()


def _ran_out(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if not isinstance(error, RuntimeError) or isinstance(error, dist.DistError):
        return False
    text = str(error).lower()
    return any(words in text for words in WORDS)


def _led_to(error: BaseException, *links: str) -> list[BaseException]:
    """The error and all errors that these links lead to; a chain may be a ring."""
    found: list[BaseException] = []
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is not None and all(one is not other for other in found):
            found.append(one)
            waiting += [getattr(one, link) for link in links]
    return found
