"""What the closed windows of a training add up to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from trainkit.core.window import (
    COLUMNS,
    COUNT,
    SAMPLES,
    WEIGHT,
    WindowStats,
    scalar,
)

NUM_WAITING = 64
"""How many windows wait until they are entered, which costs as much as for one."""

NUM_MEASURED = 8
"""Windows used to measure the batch size when the loader does not announce it."""


@dataclass(frozen=True, eq=False)
class Account:
    """Sums and extremes over the closed windows of one optimizer.

    All numbers are over all ranks, and alike on all of them. They stay on the device.
    """

    num_windows: int
    counts_samples: bool
    """Whether the samples of every window have been counted."""
    sums: Tensor
    """The columns of the windows' totals, added up."""
    extremes: Tensor
    """The smallest and the largest weight; the first and the newest loss."""

    @classmethod
    def over(cls, windows: Sequence[WindowStats], *, counts_samples: bool) -> Account:
        """The account of windows, in their order."""
        new = windows[-1].totals
        rows = [stats.totals.to(new.device) for stats in windows]
        totals = torch.stack(rows)
        losses = windows[0].loss.to(new.device), windows[-1].loss
        extremes = torch.stack([*totals[:, WEIGHT].aminmax(), *losses])
        return cls(len(windows), counts_samples, totals.sum(0), extremes)

    def with_(self, later: Account) -> Account:
        """This account and a later one together."""
        mine, theirs = self.extremes.to(later.sums), later.extremes
        smallest = torch.minimum(mine[0], theirs[0])
        largest = torch.maximum(mine[1], theirs[1])
        return Account(
            self.num_windows + later.num_windows,
            self.counts_samples and later.counts_samples,
            self.sums.to(later.sums) + later.sums,
            torch.stack([smallest, largest, mine[2], theirs[3]]),
        )

    @property
    def weight(self) -> Tensor:
        """The weights of all windows, in the strategy's unit."""
        return self.sums[WEIGHT]

    @property
    def samples(self) -> Tensor:
        """The samples of all windows; NaN if a window's could not be counted."""
        known = self.sums[SAMPLES]
        return known if self.counts_samples else torch.full_like(known, torch.nan)

    def state_dict(self) -> dict[str, Any]:
        """The account as plain numbers; waits for the device."""
        # By name: a later version may order the columns differently.
        sums = dict(zip(COLUMNS, self.sums.tolist(), strict=True))
        return {**vars(self), "sums": sums, "extremes": self.extremes.tolist()}

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> Account:
        """The account that `state_dict` has saved."""
        sums = [state["sums"][column] for column in COLUMNS]
        vectors = {
            name: torch.tensor(numbers, dtype=torch.float64)
            for name, numbers in (("sums", sums), ("extremes", state["extremes"]))
        }
        return cls(**{**state, **vectors})


class Closed(NamedTuple):
    """A window that has closed, as it waits to be entered in a ledger.

    Attributes:
        optimizer: its index, which steps with it.
        stats: its numbers.
        counts_samples: whether the samples of its batches were counted.
        num_batches: how many loader batches it had, on all ranks; None means as many as
            micro-batches.
    """

    optimizer: int
    stats: WindowStats
    counts_samples: bool
    num_batches: int | None = None


class Ledger:
    """The accounts of a training's closed windows, one for each optimizer."""

    def __init__(self) -> None:
        self._accounts: dict[int, Account] = {}

    def enter(self, closed: Sequence[Closed]) -> None:
        """Enter windows in the order in which they closed."""
        for index in {each.optimizer for each in closed}:
            own = [each for each in closed if each.optimizer == index]
            counts_samples = all(each.counts_samples for each in own)
            windows = [each.stats for each in own]
            added = Account.over(windows, counts_samples=counts_samples)
            account = self._accounts.get(index)
            self._accounts[index] = added if account is None else account.with_(added)

    def of(self, index: int = 0) -> Account | None:
        """The account of an optimizer; None before its first window has closed."""
        return self._accounts.get(index)

    def state_dict(self) -> dict[int, dict[str, Any]]:
        return {i: each.state_dict() for i, each in self._accounts.items()}

    def load_state_dict(self, state: Mapping[int, Mapping[str, Any]]) -> None:
        """Continue; accounts of other versions begin anew."""
        mine = {
            i: each
            for i, each in state.items()
            if isinstance(each.get("sums"), Mapping) and "extremes" in each
        }
        self._accounts = {i: Account.restored(each) for i, each in mine.items()}


class FirstWindows:
    """What the first windows of a loader held; nothing is read before it is asked.

    Attributes:
        loader_size: the batch size that the loader announces, if it does. A measure of
            another loader's windows is not resumed.
        is_complete: whether enough of them have closed.
    """

    def __init__(self) -> None:
        self.loader_size: float | None = None
        self.is_complete = False
        self._num_windows = 0
        self._sums: Tensor | None = None
        self._resumed: Mapping[str, Any] = {}

    def __len__(self) -> int:
        return self._num_windows + int(self._resumed.get("windows", 0))

    def enter(self, closed: Iterable[Closed]) -> None:
        """Measure those of these windows that are among the first."""
        for each in closed:
            if not self.is_complete:
                self._add(each.stats, each.num_batches)

    def _add(self, stats: WindowStats, num_batches: int | None) -> None:
        self._num_windows += 1
        self.is_complete = len(self) >= NUM_MEASURED
        totals = stats.totals
        number = scalar(num_batches, totals.device) if num_batches else totals[COUNT]
        sums = torch.stack([totals[SAMPLES], totals[WEIGHT], number])
        self._sums = sums if self._sums is None else self._sums + sums

    def micro_batch(self, what: Literal["samples", "weight"]) -> float | None:
        """The mean `samples` or `weight` of a loader batch; waits for the device.

        None if no window has closed, or if not all samples could be counted.
        """
        totals = self._totals()
        held = totals[what]
        return held / totals["num_micro_batches"] if held > 0 else None

    @property
    def is_empty(self) -> bool:
        """Whether no window of this run has weighed anything; waits for the device."""
        return self._sums is None or not bool(self._sums[1] > 0)

    def _totals(self) -> dict[str, float]:
        found = [0.0, 0.0, 0.0] if self._sums is None else self._sums.tolist()
        names = zip(("samples", "weight", "num_micro_batches"), found, strict=True)
        return {name: own + self._resumed.get(name, 0.0) for name, own in names}

    def state_dict(self) -> dict[str, Any]:
        return {"windows": len(self), "loader": self.loader_size, **self._totals()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.get("loader") == self.loader_size:
            self._resumed = state
            self.is_complete = len(self) >= NUM_MEASURED
