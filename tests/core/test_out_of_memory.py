"""Memory that runs out is told from other errors, and what it held comes free."""

from __future__ import annotations

import weakref

import pytest
import torch

from trainkit.core.out_of_memory import RECOGNISED, is_out_of_memory, release

ABSURD = 2**60


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
        *(RuntimeError(f"[somewhere.cpp:1] {text} (more)") for text in RECOGNISED),
    ],
)
def test_each_known_error_is_recognised(error: Exception) -> None:
    assert is_out_of_memory(error)


def test_the_text_alone_is_not_enough() -> None:
    """An assertion of a user's that quotes the words is no failure to allocate."""
    assert not is_out_of_memory(AssertionError("CUDA out of memory"))


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
