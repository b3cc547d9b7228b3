"""The random states of chunks: kept when a chunk runs, put back when it runs again."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class States:
    """The states of random generators at one moment.

    torch's are always kept. NumPy's and Python's cost more than a small chunk, so they
    are kept once a module was seen to draw from them.

    Args:
        devices: on which a module may draw, besides the CPU.
        of_host: whether NumPy's and Python's are kept too.
    """

    def __init__(self, devices: Iterable[torch.device], *, of_host: bool) -> None:
        self._on_cuda: list[torch.device] = []
        self._of_torch: list[Tensor] = [torch.get_rng_state()]
        for each in devices:
            if each.type == "cuda":
                self._on_cuda.append(each)
                self._of_torch.append(torch.cuda.get_rng_state(each))
        self._of_host = host_states() if of_host else None

    def put_back(self) -> None:
        """Let all generators draw from here again."""
        on_cpu, *on_cuda = self._of_torch
        torch.set_rng_state(on_cpu)
        for device, state in zip(self._on_cuda, on_cuda, strict=True):
            torch.cuda.set_rng_state(state, device)
        if self._of_host is not None:
            of_python, of_numpy = self._of_host
            random.setstate(of_python)
            if of_numpy is not None:
                sys.modules["numpy.random"].set_state(of_numpy)

    def are(self, other: States) -> bool:
        """Whether nothing was drawn between two moments."""
        return all(map(torch.equal, self._of_torch, other._of_torch)) and (
            self._of_host is other._of_host
            or pickle.dumps(self._of_host) == pickle.dumps(other._of_host)
        )

    def has_host_moved(self) -> bool:
        """Whether NumPy or Python has drawn since."""
        return pickle.dumps(self._of_host) != pickle.dumps(host_states())


def host_states() -> tuple[Any, Any]:
    """The states of Python's and NumPy's global generators."""
    numpy: Any = sys.modules.get("numpy.random")
    return random.getstate(), None if numpy is None else numpy.get_state()
