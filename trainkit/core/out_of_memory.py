"""Out of memory: how the error is recognised, and how its memory comes free.

Newer versions of torch raise ``torch.OutOfMemoryError`` for the accelerators'
caching allocators. Everything else that runs out raises a plain RuntimeError and is
known by its text alone: `RECOGNISED` is the one list of them.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Iterator

import torch

RECOGNISED = (
    # The CPU allocator (c10/core/impl/alloc_cpu.cpp): on POSIX, then on Windows.
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    # The devices' allocators, where they do not raise torch.OutOfMemoryError: CUDA
    # and HIP before torch 1.13, XPU, and MPS (aten/src/ATen/mps/MPSAllocator.mm).
    "CUDA out of memory",
    "HIP out of memory",
    "XPU out of memory",
    "MPS backend out of memory",
    # A call of the driver outside the caching allocator (c10/cuda/CUDAException.h,
    # c10/cuda/driver_api.h, Triton's launcher).
    "CUDA error: out of memory",
    "HIP error: out of memory",
    "CUDA driver error: out of memory",
    "Triton Error [CUDA]: out of memory",
    # Libraries that could not allocate their workspace (ATen/cuda/Exceptions.h).
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
    "CUSPARSE_STATUS_ALLOC_FAILED",
    "CUFFT_ALLOC_FAILED",
    # cuDNN says this where no algorithm fits in what is left (pytorch #4107; both
    # Lightning and Accelerate read it so), newer versions in the other words.
    "CUDNN_STATUS_NOT_SUPPORTED",
    "Unable to find a valid cuDNN algorithm to run convolution",
    "unable to find an engine to execute this computation",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Say whether memory ran out, on a device or on the host.

    An error raised *from* such a one counts too (``torch.compile`` and loaders wrap
    what they catch). A collective that ran out of memory does not: its group is
    broken, and doing less work does not mend it.

    Examples:
        >>> is_out_of_memory(RuntimeError("CUDA error: out of memory"))
        True
        >>> is_out_of_memory(RuntimeError("mat1 and mat2 must have the same dtype"))
        False
    """
    return any(_ran_out(one) for one in _causes(error))


def release(error: BaseException) -> None:
    """Free what the error's traceback holds: the frames that failed, their tensors.

    The error keeps its type and its text, and so do the errors that led to it.
    """
    for one in _chain(error):
        traceback.clear_frames(one.__traceback__)
        one.__traceback__ = None
    gc.collect()
    _return_cached_blocks()


def _ran_out(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and any(part in text for part in RECOGNISED)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and what it was raised from (a chain may be a ring)."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__


def _chain(error: BaseException) -> list[BaseException]:
    """List the error with all that led to it, raised from or handled."""
    found: list[BaseException] = []
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is not None and all(one is not other for other in found):
            found.append(one)
            waiting += [one.__cause__, one.__context__]
    return found


def _return_cached_blocks() -> None:
    """Give the device's cached blocks back, so that other sizes find room."""
    if not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.empty_cache()
    except RuntimeError as error:  # emptying the cache can itself run out of memory
        if not is_out_of_memory(error):
            raise
