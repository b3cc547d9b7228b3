"""The states of random generators: read, written, kept."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch


def generator_keeper(value: Any) -> Callable[[], None] | None:
    """What puts a generator back to where it is now; None for other objects.

    >>> own = random.Random(0)
    >>> put_back = generator_keeper(own)
    >>> first = own.random()
    >>> put_back()
    >>> own.random() == first, generator_keeper("no generator")
    (True, None)

    Args:
        value: a `torch.Generator`, a `random.Random`, one of NumPy's, or anything else.
    """
    if not is_generator(value):
        return None
    if issubclass(type(value), random.Random):
        of_python = value.getstate()
        return lambda: value.setstate(of_python)
    if hasattr(value, "get_state"):
        old = value.get_state()
        return lambda: _nothing(value.set_state(old))
    bits, state = value.bit_generator, value.bit_generator.state
    return lambda: setattr(bits, "state", state)


def is_generator(value: Any) -> bool:
    """Whether it is a random generator of torch, Python or NumPy."""
    numpy = sys.modules.get("numpy.random")
    numpys = () if numpy is None else (numpy.RandomState, numpy.Generator)
    # By the type alone: `__class__` may be a property that fails.
    return issubclass(type(value), (torch.Generator, random.Random, *numpys))


def _nothing(_: Any) -> None:
    pass


def read_states(device: torch.device) -> dict[str, Any]:
    """The states of all generators as tensors, numbers and tuples, so that a file of
    them loads as `weights_only`."""
    states: dict[str, Any] = {
        "python": random.getstate(),
        "torch": torch.get_rng_state(),
    }
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        name, keys, *rest = numpy.get_state()
        states["numpy"] = (str(name), keys.tolist(), *(_plain(x) for x in rest))
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def write_states(states: dict[str, Any], device: torch.device) -> None:
    """Put all generators back to what `read_states` has read."""
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(states["torch"].cpu())
    numpy = sys.modules.get("numpy.random")
    if numpy is not None and "numpy" in states:
        numpy.set_state(states["numpy"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"].cpu(), device)


@contextlib.contextmanager
def random_kept(device: torch.device | None = None) -> Iterator[None]:
    """What is drawn within is drawn from no generator of the run, also if it fails."""
    device = device or torch.device("cpu")
    states = read_states(device)
    try:
        yield
    finally:
        write_states(states, device)


def seed_all(number: int) -> None:
    """Set what augmentation and dropout draw from."""
    torch.manual_seed(number)
    random.seed(number)
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed(number % 2**32)


def _plain(number: Any) -> int | float:
    return float(number) if isinstance(number, float) else int(number)
