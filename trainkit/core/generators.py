"""The states of random generators: read, written, kept."""

from __future__ import annotations

import contextlib
import pickle
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor


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


class States:
    """The states of the random generators of torch, NumPy and Python at one moment.

    Args:
        devices: on which a module may draw, besides the CPU.
        of_host: False leaves out NumPy's and Python's.
    """

    def __init__(
        self, devices: Iterable[torch.device], *, of_host: bool = True
    ) -> None:
        self._of_torch: dict[Any, Tensor] = {None: torch.get_rng_state()}
        for each in devices:
            if each.type == "cuda":
                self._of_torch[each] = torch.cuda.get_rng_state(each)
        self._numpy: Any = sys.modules.get("numpy.random") if of_host else None
        of_numpy = None if self._numpy is None else self._numpy.get_state()
        self._of_host = random.getstate() if of_host else None, of_numpy

    def put_back(self) -> None:
        """Let all generators draw from here again."""
        for device, state in self._of_torch.items():
            if device is None:
                torch.set_rng_state(state)
            else:
                torch.cuda.set_rng_state(state, device)
        of_python, of_numpy = self._of_host
        if of_python is not None:
            random.setstate(of_python)
        if self._numpy is not None:
            self._numpy.set_state(of_numpy)

    def are(self, other: States) -> bool:
        """Whether nothing was drawn between two moments."""
        return self.of_host_are(other) and all(
            map(torch.equal, self._of_torch.values(), other._of_torch.values())
        )

    def of_host_are(self, other: States) -> bool:
        """Whether neither Python's nor NumPy's generator was drawn from."""
        (of_python, of_numpy), (python, numpy) = self._of_host, other._of_host
        is_same = of_python == python
        return is_same and pickle.dumps(of_numpy) == pickle.dumps(numpy)


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
    states = States([] if device is None else [device])
    try:
        yield
    finally:
        states.put_back()


def seed_torch(number: int) -> None:
    """Set torch's generators.

    For devices that begin later `torch.manual_seed` notes the whole stack, which takes
    milliseconds; where there are none, nothing is noted.
    """
    if torch.accelerator.is_available():
        torch.manual_seed(number)
    else:
        torch.default_generator.manual_seed(number)


def seed_all(number: int) -> None:
    """Set what augmentation and dropout draw from."""
    seed_torch(number)
    random.seed(number)
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed(number % 2**32)


def _plain(number: Any) -> int | float:
    return float(number) if isinstance(number, float) else int(number)
