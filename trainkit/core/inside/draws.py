"""The random states of chunks: kept when a chunk runs, put back when it runs again."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from trainkit.core.generators import generator_keeper


class Draws:
    """Keeps the states of all generators that a module draws from.

    torch's are always kept. NumPy's and Python's cost more than a small chunk, so they
    are kept once the module was seen to draw from them.

    Attributes:
        of_host: whether it draws from NumPy's or Python's global generator.
        own: generators that the module, or a module in it, has as an attribute.
    """

    def __init__(self) -> None:
        self.of_host = False
        self.own: list[Any] = []

    def look(self, module: nn.Module) -> Callable[[], None]:
        """Find a module's own generators, and what is to be called after it has run."""
        held = [value for each in module.modules() for value in vars(each).values()]
        self.own = [value for value in held if generator_keeper(value) is not None]
        before = _states_of_host()

        def note() -> None:
            self.of_host = self.of_host or _states_of_host() != before

        return note

    def keep(
        self, devices: Iterable[torch.device], states: list[torch.Tensor] | None = None
    ) -> Callable[[], None]:
        """What puts all states back to where they are now.

        Args:
            devices: on which the module may draw, besides the CPU.
            states: what `torch_states` read just now; default: it is read.
        """
        on_cuda = _cuda(devices)
        on_cpu, *others_of_torch = states or torch_states(on_cuda)
        others = [generator_keeper(each) for each in self.own]
        if self.of_host:
            others += [_keep_python(), _keep_numpy()]

        def put_back() -> None:
            torch.set_rng_state(on_cpu)
            for device, state in zip(on_cuda, others_of_torch, strict=True):
                torch.cuda.set_rng_state(state, device)
            for other in others:
                if other is not None:
                    other()

        return put_back


def torch_states(devices: Iterable[torch.device]) -> list[torch.Tensor]:
    """The states of torch's generators, to compare."""
    on_cuda = [torch.cuda.get_rng_state(each) for each in _cuda(devices)]
    return [torch.get_rng_state(), *on_cuda]


def _cuda(devices: Iterable[torch.device]) -> list[torch.device]:
    return [each for each in devices if each.type == "cuda"]


def _keep_python() -> Callable[[], None]:
    state = random.getstate()
    return lambda: random.setstate(state)


def _keep_numpy() -> Callable[[], None] | None:
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is None:
        return None
    state = numpy.get_state()
    return lambda: numpy.set_state(state)


def _states_of_host() -> list[Any]:
    states: list[Any] = [random.getstate()]
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        name, keys, *rest = numpy.get_state()
        states.append((name, keys.tobytes(), *rest))
    return states
