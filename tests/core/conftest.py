"""Ranks that stay for many files: to start some takes longer than what they do."""

from __future__ import annotations

import contextlib
import io
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from tests.helpers import PATIENCE, RankError, run_ranks, start_gloo

OnRanks = Callable[..., list[Any]]


class LastingRanks:
    """Processes in one process group, which run one function after the other."""

    def __init__(self, world_size: int) -> None:
        self.until = time.monotonic() + PATIENCE / 3  # `run_ranks` ends them later
        self.pipes, theirs = zip(*(Pipe() for _ in range(world_size)), strict=True)
        arguments = (_serve, world_size, theirs)
        self.thread = threading.Thread(target=run_ranks, args=arguments, daemon=True)
        self.thread.start()

    def run(self, function: Any, *args: Any) -> list[Any]:
        for pipe in self.pipes:
            _send(pipe, (function, args))
        found = []
        for pipe in self.pipes:
            assert pipe.poll(PATIENCE / 2), f"{function.__name__} hung"
            found.append(_receive(pipe))
            if isinstance(found[-1], RankError):
                raise found[-1]
        return found

    def leave(self) -> None:
        with contextlib.suppress(OSError):  # `run_ranks` has ended them
            for pipe in self.pipes:
                _send(pipe, None)
        self.thread.join(PATIENCE / 2)


def _serve(rank: int, world_size: int, pipes: Sequence[Connection]) -> None:
    start_gloo()
    # Who is asked nothing any more leaves before `run_ranks` finds that it hangs.
    while pipes[rank].poll(PATIENCE / 2) and (call := _receive(pipes[rank])):
        function, args = call
        try:
            result = function(rank, world_size, *args)
        except BaseException as error:
            text = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
            result = RankError(text)
        _send(pipes[rank], result)


def _send(pipe: Connection, value: Any) -> None:
    file = io.BytesIO()
    torch.save(value, file)
    pipe.send_bytes(file.getvalue())


def _receive(pipe: Connection) -> Any:
    return torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False)


@pytest.fixture(scope="session")
def on_ranks() -> Iterator[OnRanks]:
    """Run `function(rank, world_size, *args)` on so many ranks, which have started gloo
    and stay for the next call; the function must stand at the top level of a module."""
    lasting: dict[int, LastingRanks] = {}

    def run(function: Any, world_size: int, *args: Any) -> list[Any]:
        if world_size in lasting and time.monotonic() > lasting[world_size].until:
            lasting.pop(world_size).leave()
        if world_size not in lasting:
            lasting[world_size] = LastingRanks(world_size)
        try:
            return lasting[world_size].run(function, *args)
        except BaseException:
            del lasting[world_size]  # its ranks may wait for one another
            raise

    yield run
    for ranks in lasting.values():
        ranks.leave()
