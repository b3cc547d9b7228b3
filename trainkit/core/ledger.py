"""What the closed windows of a training add up to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainkit.core.window import (
    COLUMNS,
    SAMPLES,
    WEIGHT,
    WindowStats,
)

NUM_WAITING = 64
"""How many windows wait until they are entered, which costs as much as for one."""


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
    """

    optimizer: int
    stats: WindowStats
    counts_samples: bool


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
