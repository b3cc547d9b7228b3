"""Functions that run in turns, and wait for each other where they meet."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from greenlet import GreenletExit, getcurrent, greenlet

from trainkit.core._compat import num_modes, settings_of_thread
from trainkit.errors import TrainkitError

Join = Callable[[list[Any]], list[Any]]
"""Makes of what all branches bring what each one gets."""


@dataclass
class _Waiting:
    """What a branch waits for."""

    place: Any
    name: str
    brought: Any
    join: Join


class _Branch(greenlet):
    """One of the functions, with what torch holds for it while it waits."""

    def __init__(self, owner: Branches, run: Callable[[], Any]) -> None:
        super().__init__(run)
        self.gr_context = contextvars.copy_context()
        self.owner = owner
        self.waiting: _Waiting | None = None
        self.result: Any = None
        self.settings: Callable[[], None] | None = None


def current() -> Branches | None:
    """The branches of which one runs now, if one does."""
    branch = getcurrent()
    return branch.owner if isinstance(branch, _Branch) else None


def _random_state() -> bytes:
    return torch.get_rng_state().numpy().tobytes()


class Branches:
    """Runs one function for each micro-batch of a window, in one thread.

    One runs at a time, from one place where they meet to the next. There each hands in
    something, waits until all have, and gets its own result. What torch holds for a
    thread, such as autocast, is kept for each branch.

    Args:
        runs: the functions.
        switched: is called with the number of the branch that runs next.
        owner: whose branches they are.
    """

    def __init__(
        self,
        runs: Sequence[Callable[[], Any]],
        switched: Callable[[int], None] = lambda index: None,
        owner: Any = None,
    ) -> None:
        self._runs, self._switched = runs, switched
        self._branches: list[_Branch] = []
        self._num_modes, self._is_inference = 0, False
        self._starts: set[bytes] = set()
        self.owner = owner

    def __iter__(self) -> Generator[Any, None, None]:
        """What each function returns, in order. Once all have met for the last time,
        none resumes before its result is asked for."""
        self._branches = [_Branch(self, run) for run in self._runs]
        self._num_modes = num_modes()
        self._is_inference = torch.is_inference_mode_enabled()
        results: list[Any] = [None] * len(self._branches)
        try:
            while True:
                for index, branch in enumerate(self._branches):
                    before = _random_state()
                    if branch.settings is None:
                        self._starts.add(before)
                    found = self._resume(index, results[index])
                    results[index] = None
                    if branch.dead:
                        self._refuse_rewound(before)
                        yield found
                if all(branch.dead for branch in self._branches):
                    return
                results = self._join()
        finally:
            self._end()

    def meet(self, place: Any, name: str, brought: Any, join: Join) -> Any:
        """Within a branch: hand something in, and wait for the others.

        Args:
            place: the same object in all branches.
            name: of it, for messages.
            brought: by this branch.
            join: called once with what all have brought, in order.
        """
        branch = getcurrent()
        assert isinstance(branch, _Branch)
        assert branch.parent is not None
        if num_modes() != self._num_modes:
            raise TrainkitError(
                f"exact BatchNorm: a mode of torch, such as a default device, was "
                f"opened on the way to {name}, where micro-batches wait for each "
                f"other. Open it around the whole step."
            )
        if torch.is_inference_mode_enabled() != self._is_inference:
            raise TrainkitError(
                f"exact BatchNorm: {name} is called in inference mode, and micro-"
                f"batches that are not would wait there. Use torch.no_grad()."
            )
        branch.waiting = _Waiting(place, name, brought, join)
        return branch.parent.switch()

    def _refuse_rewound(self, before: bytes) -> None:
        """Refuse a branch that has ended with the random state of a branch's start:
        the next ones would draw the same numbers again, and so would the next window.
        """
        now = _random_state()
        if len(self._branches) > 1 and now != before and now in self._starts:
            raise TrainkitError(
                "exact BatchNorm: random states are kept before and put back behind a "
                "call where micro-batches wait for each other, as by "
                "torch.random.fork_rng(), so that all would draw alike. Put them back "
                "before the call, or cut inside the step, which then runs once: "
                "MicroBatching(inside=...), or exact_batch_norm(..., size=...)."
            )

    def _resume(self, index: int, result: Any) -> Any:
        branch = self._branches[index]
        main = settings_of_thread()
        (branch.settings or main)()
        self._switched(index)
        branch.waiting = None
        try:
            return branch.switch(*() if branch.settings is None else (result,))
        except Exception as error:
            write = getattr(error, "add_note", None)  # Python 3.10 has none
            if write is not None:
                write(
                    f"trainkit | exact BatchNorm: raised in micro-batch {index + 1} of "
                    f"{len(self._branches)}, which run in turns"
                )
            raise
        finally:
            branch.settings = settings_of_thread()
            main()

    def _join(self) -> list[Any]:
        """Do what all wait for, as the first branch would."""
        waiting = [branch.waiting for branch in self._branches]
        at = [None if each is None else each.name for each in waiting]
        places = {None if each is None else id(each.place) for each in waiting}
        first = waiting[0]
        if len(places) > 1 or first is None:
            where = " and ".join(sorted({name or "the end" for name in at}))
            raise TrainkitError(
                f"exact BatchNorm: all micro-batches must call the same layers in the "
                f"same order, and they have come to {where}. Let forward not depend on "
                f"the data, or use another policy of BatchNormGuard."
            )
        branch = self._branches[0]
        main = settings_of_thread()
        assert branch.settings is not None
        branch.settings()
        try:
            return first.join([each.brought for each in waiting if each is not None])
        except Exception as error:
            self._switched(0)
            branch.throw(error)  # so that the line that called the layer is shown
            raise
        finally:
            branch.settings = settings_of_thread()
            main()

    def _end(self) -> None:
        """Unwind the branches that have not ended."""
        main = settings_of_thread()
        try:
            for branch in self._branches:
                if branch.settings is not None and not branch.dead:
                    branch.settings()
                    with contextlib.suppress(Exception):  # the first error counts
                        branch.throw(GreenletExit)
                    settings_of_thread()
        finally:
            main()
            self._branches = []
