"""What the core knows of torch beyond its documentation: private names still hold, and
memory that runs out is told from other errors."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from tests.helpers import raise_rank_errors, run_ranks, start_gloo
from trainkit.core import _compat
from trainkit.core.out_of_memory import is_out_of_memory, release


@pytest.mark.parametrize(
    "when", ["register_hook", "register_post_accumulate_grad_hook"]
)
def test_a_gradient_hook_is_found_until_it_is_removed(when: str) -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    assert not _compat.has_gradient_hook(parameter)
    handle = getattr(parameter, when)(lambda gradient: None)
    assert _compat.has_gradient_hook(parameter)
    handle.remove()
    assert not _compat.has_gradient_hook(parameter)


class Counting(TorchFunctionMode):
    """Counts the calls of a function."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.times = name, 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.times += func.__name__ == self.name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("reentrant", [True, False])
def test_modes_see_what_a_backward_pass_computes_anew(reentrant: bool) -> None:
    weight, x = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)

    def seen(backward: Callable[[torch.Tensor], Any]) -> int:
        with Counting("relu") as mode:
            run = lambda x: torch.relu(weight * x)  # noqa: E731
            backward(checkpoint(run, x, use_reentrant=reentrant).sum())
        return mode.times

    assert seen(_compat.backward_in_modes) == 2
    assert weight.grad is not None
    assert weight.grad.tolist() == [1.0, 1.0]
    assert seen(torch.autograd.backward) == 1  # the control


def test_a_backward_pass_in_modes_takes_what_backward_takes() -> None:
    weight, other = (torch.ones(2, requires_grad=True) for _ in range(2))
    out = 3 * weight + other
    _compat.backward_in_modes(out, torch.ones(2), True, inputs=[weight])
    assert other.grad is None
    _compat.backward_in_modes(out, gradient=2 * torch.ones(2))
    assert weight.grad is not None
    assert weight.grad.tolist() == [9.0, 9.0]


def test_a_backward_pass_in_modes_begins_at_several_tensors() -> None:
    weight = torch.ones(2, requires_grad=True)
    several = [(2 * weight).sum(), 3 * weight]
    _compat.backward_in_modes(several, grad_tensors=[None, torch.ones(2)])
    assert weight.grad is not None
    assert weight.grad.tolist() == [5.0, 5.0]


def test_version_counts_writes_in_place() -> None:
    tensor = torch.zeros(3)
    before = _compat.version_of(tensor)
    torch._foreach_zero_([tensor])  # pyright: ignore[reportPrivateImportUsage]
    assert _compat.version_of(tensor) > before


def test_transforms_of_torch_func_are_seen() -> None:
    seen: list[bool] = []

    def noted(x: torch.Tensor) -> torch.Tensor:
        seen.append(_compat.transform() is not None)
        return x.sum()

    torch.func.grad(noted)(torch.ones(2))
    noted(torch.ones(2))
    assert seen == [True, False]


def test_hooks_around_are_left_out() -> None:
    packed: list[Any] = []
    x = torch.ones(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: packed.append(tensor) or tensor, lambda tensor: tensor
    ):
        with _compat.without_hooks():
            x.exp()
        assert not packed
        x.exp()
    assert len(packed) == 1
    with _compat.without_hooks():
        assert torch.func.grad(torch.sin)(torch.zeros(())) == 1


def _numbers_seen(rank: int, world_size: int) -> list[tuple[int, int, float]]:
    start_gloo()
    seen = []

    def see() -> None:
        total = torch.tensor(float(1 + rank))
        dist.all_reduce(total)
        seen.append((dist.get_rank(), dist.get_world_size(), float(total)))

    see()
    with _compat.alone_among_ranks():
        for _ in range(1 + rank):  # nobody waits for anybody
            see()
    see()
    with _compat.alone_among_ranks():
        see()
    return seen


def test_a_rank_can_be_alone_for_a_while() -> None:
    one, other = raise_rank_errors(run_ranks(_numbers_seen, 2))
    assert one == [(0, 2, 3.0), (0, 1, 1.0), (0, 2, 3.0), (0, 1, 1.0)]
    assert other == [(1, 2, 3.0), *[(0, 1, 2.0)] * 2, (1, 2, 3.0), (0, 1, 2.0)]


# ---- out of memory -------------------------------------------------------------------

ABSURD = 2**60
TEXTS = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUDA out of memory",
    "Triton Error [CUDA]: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_NOT_SUPPORTED",
    "Unable to find a valid cuDNN algorithm to run convolution",
    "unable to find an engine to execute this computation",
)


def raised(call: object) -> BaseException:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - whatever it is
        call()  # type: ignore[operator]
    return caught.value


def test_what_the_cpu_allocator_raises_is_out_of_memory() -> None:
    """It has no type of its own; this is the real one."""
    error = raised(lambda: torch.empty(ABSURD))
    assert type(error) is RuntimeError
    assert is_out_of_memory(error)


def test_what_other_mistakes_raise_is_not() -> None:
    """RuntimeErrors of torch, of which most errors are."""
    shapes = raised(lambda: torch.zeros(2, 3) @ torch.zeros(2, 3))
    dtypes = raised(lambda: torch.zeros(2, 2) @ torch.zeros(2, 2).double())
    device = raised(lambda: torch.zeros(2, device="meta").item())
    assert not any(map(is_out_of_memory, (shapes, dtypes, device)))
    assert not is_out_of_memory(KeyboardInterrupt())


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        torch.cuda.OutOfMemoryError(),
        MemoryError("Unable to allocate 4.00 EiB for an array"),
        *(RuntimeError(f"[somewhere.cpp:1] {text} (more)") for text in TEXTS),
    ],
)
def test_each_known_error_is_recognised(error: Exception) -> None:
    assert is_out_of_memory(error)


def test_the_text_alone_is_not_enough() -> None:
    """An assertion of a user's that quotes the words is no failure to allocate, and a
    collective that ran out of memory has broken its group."""
    assert not is_out_of_memory(AssertionError("CUDA out of memory"))
    nccl = "ncclUnhandledCudaError: Last error: Cuda failure 2 'out of memory'"
    assert not is_out_of_memory(dist.DistBackendError(nccl))
    assert is_out_of_memory(RuntimeError(nccl))  # the control


def test_an_error_raised_from_one_counts_and_one_beside_it_does_not() -> None:
    def wraps() -> None:
        try:
            torch.empty(ABSURD)
        except RuntimeError as error:
            raise ValueError("the compiled graph failed") from error

    def follows() -> None:
        try:
            torch.empty(ABSURD)
        except RuntimeError:
            raise ValueError("and then a mistake in the handler")  # noqa: B904

    assert is_out_of_memory(raised(wraps))
    assert not is_out_of_memory(raised(follows))


def test_a_ring_of_causes_ends() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert not is_out_of_memory(first)
    release(first)


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_release_frees_what_only_the_traceback_holds(is_wrapped: bool) -> None:
    held: list[weakref.ref[torch.Tensor]] = []

    def forward() -> None:
        activations = torch.zeros(1000)
        held.append(weakref.ref(activations))
        torch.empty(ABSURD)

    def step() -> None:
        try:
            forward()
        except RuntimeError as error:
            if not is_wrapped:
                raise
            raise ValueError("wrapped") from error

    failure: BaseException = KeyError("nothing was raised")
    try:
        step()
    except (RuntimeError, ValueError) as error:
        failure = error
    assert held[0]() is not None, "nothing to free: the test proves nothing"
    text = str(failure)
    release(failure)
    assert held[0]() is None
    assert str(failure) == text
    assert is_out_of_memory(failure)
