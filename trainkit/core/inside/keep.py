"""How many chunks keep their graph, so that they need no second pass."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch

from trainkit.core.plan.options import check_whole_number
from trainkit.errors import TrainkitError

Keep = int | str | Literal["auto"]

UNITS = {"B": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30}

MARGIN = 0.1
"""The share of a device's memory that `"auto"` leaves free."""


def checked_keep(keep: Any) -> Keep:
    """A number of chunks, `"auto"`, or bytes such as `"2GB"`; refuses all else.

    >>> checked_keep("512 MB")
    '512 MB'
    """
    if keep == "auto" or isinstance(keep, str) and _bytes_of(keep) is not None:
        return keep
    if isinstance(keep, str) or keep is None:
        raise TrainkitError(
            f"keep: must be 'auto', a number of chunks, or bytes such as '2GB', "
            f"received {keep!r}."
        )
    check_whole_number("keep", keep, least=0)
    return keep


class Keeper:
    """Says how many of a call's chunks keep their graph until the backward pass.

    With `"auto"` that is the last chunk of a step's last call: its backward pass comes
    next, so that its graph costs no memory. On a CUDA device more are kept while the
    step's highest use of memory leaves room for them.

    Args:
        keep: `"auto"`, a number of chunks, or a number of bytes with its unit.
        room: the bytes of a device that were never used; replaced in tests.

    Attributes:
        keep: as given.
        row_bytes: what the graph of one row holds.
    """

    def __init__(
        self,
        keep: Keep = "auto",
        *,
        room: Callable[[torch.device], int | None] | None = None,
    ) -> None:
        self.keep = checked_keep(keep)
        self._budget = _bytes_of(keep) if isinstance(keep, str) else None
        self._room = room or room_of
        self.row_bytes = 0
        self._calls = self._last = self._passes = 0
        self._extra = 0

    def begin(self, devices: Iterable[torch.device], rows: int) -> int:
        """How many chunks of the call that begins keep their graph.

        Args:
            devices: of its arguments.
            rows: of a chunk.
        """
        size = rows * self.row_bytes
        self._calls += 1
        if isinstance(self.keep, int):
            return self.keep
        if self._budget is not None:
            return self._budget // size if size else 0
        if self._calls != self._last:
            return 0
        number = self._passes
        if number >= 2 and number & (number - 1) == 0 and size:
            rooms = [self._room(device) for device in devices]
            least = min((each for each in rooms if each is not None), default=0)
            self._extra = max(0, self._extra + least // size)
        return 1 + self._extra

    def failed(self) -> bool:
        """Memory ran out; returns whether more was kept than was asked for."""
        had_more, self._extra = self._extra > 0, 0
        return had_more

    def passed(self) -> None:
        """A backward pass has begun: the step has had all its calls."""
        if self._calls:
            self._last, self._calls = self._calls, 0
            self._passes += 1


def room_of(device: torch.device) -> int | None:
    """The bytes of a CUDA device that no moment of the run has used; None elsewhere."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_reserved(device)
    used = torch.cuda.max_memory_allocated(device)
    return int(free + held - used - MARGIN * total)


def _bytes_of(text: str) -> int | None:
    """
    >>> _bytes_of("2GB"), _bytes_of("1.5 MB"), _bytes_of("two")
    (2147483648, 1572864, None)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]?B)\s*", text, re.IGNORECASE)
    return int(float(found[1]) * UNITS[found[2].upper()]) if found else None
