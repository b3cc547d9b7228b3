"""The random states of chunks: kept when a chunk runs, put back when it runs again."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.core.generators import generator_keeper, is_generator
from trainkit.core.inside.moment import KINDS, OF_TORCH


class Draws:
    """Keeps the states of all generators that a module draws from.

    torch's are always kept. NumPy's and Python's cost more than a small chunk, so they
    are kept once the module was seen to draw from them.

    Attributes:
        of_host: whether it draws from NumPy's or Python's global generator.
        of_backward: whether its backward pass draws.
        own: generators that the module, or a module in it, has as an attribute.
    """

    def __init__(self) -> None:
        self.of_host = self.of_backward = False
        self.own: list[Any] = []

    def __getstate__(self) -> dict[str, Any]:
        """A copy begins anew: generators cannot be pickled."""
        return vars(Draws())

    def look(self, module: nn.Module) -> None:
        """Find a module's own generators."""
        self.own = [
            value
            for each in module.modules()
            for name, value in vars(each).items()
            if name not in OF_TORCH and type(value) not in KINDS and is_generator(value)
        ]

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
        own = [generator_keeper(each) for each in self.own]
        on_host = states_of_host() if self.of_host else None

        def put_back() -> None:
            torch.set_rng_state(on_cpu)
            for device, state in zip(on_cuda, others_of_torch, strict=True):
                torch.cuda.set_rng_state(state, device)
            for each in own:
                if each is not None:
                    each()
            if on_host is not None:
                put_back_on_host(on_host)

        return put_back

    def note(self, before: Sequence[Any]) -> bool:
        """Note whether the host's generators have moved since; return whether that is
        new."""
        python, numpy = states_of_host()
        has_moved = python != before[0] or (
            numpy is not None
            and any(
                (one != two).any() if hasattr(one, "any") else one != two
                for one, two in zip(numpy, before[1] or numpy, strict=True)
            )
        )
        is_new = has_moved and not self.of_host
        self.of_host = self.of_host or has_moved
        return is_new


def states_of_host() -> tuple[Any, Any]:
    """The states of Python's and NumPy's global generators."""
    numpy: Any = sys.modules.get("numpy.random")
    return random.getstate(), None if numpy is None else numpy.get_state()


def put_back_on_host(states: tuple[Any, Any]) -> None:
    """Put Python's and NumPy's global generators back to these states."""
    random.setstate(states[0])
    if states[1] is not None:
        sys.modules["numpy.random"].set_state(states[1])


def torch_states(devices: Iterable[torch.device]) -> list[Tensor]:
    """The states of torch's generators, to compare."""
    on_cuda = [torch.cuda.get_rng_state(each) for each in _cuda(devices)]
    return [torch.get_rng_state(), *on_cuda]


def are_same(states: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether nothing was drawn between two readings of random states."""
    return all(map(torch.equal, states, others))


def _cuda(devices: Iterable[torch.device]) -> list[torch.device]:
    return [each for each in devices if each.type == "cuda"]
