"""What the closed windows of a training add up to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainkit.core.strategies import LossReduction
from trainkit.core.window import SAMPLES, WEIGHT, WindowStats


@dataclass(eq=False)
class Account:
    """Sums and extremes over the closed windows of one optimizer.

    All numbers are over all ranks, and alike on all of them. They stay on the device,
    and none is written over.
    """

    num_windows: int
    counts_samples: bool
    """Whether the samples of every window have been counted."""
    reduction: LossReduction
    sums: Tensor
    """The columns of the windows' totals, added up."""
    smallest: Tensor
    """The smallest weight of a window."""
    largest: Tensor
    """The largest weight of a window."""
    first: Tensor
    """The totals of the first window."""
    newest: Tensor
    """The totals of the newest window."""

    @classmethod
    def over(cls, stats: WindowStats, *, counts_samples: bool) -> Account:
        """The account of a first window."""
        totals, weight = stats.totals, stats.weight
        which = totals, weight, weight, totals, totals
        return cls(1, counts_samples, stats.reduction, *which)

    def add(self, stats: WindowStats, *, counts_samples: bool) -> None:
        """Add a later window."""
        totals, weight = stats.totals, stats.weight
        self.num_windows += 1
        self.counts_samples = self.counts_samples and counts_samples
        self.sums = self.sums.to(totals) + totals
        self.smallest = torch.minimum(self.smallest.to(totals), weight)
        self.largest = torch.maximum(self.largest.to(totals), weight)
        self.newest = totals

    @property
    def extremes(self) -> Tensor:
        """The smallest and the largest weight; the first and the newest loss."""
        ends = self.first.to(self.newest), self.newest
        losses = [WindowStats(each, each, self.reduction).loss for each in ends]
        return torch.stack([self.smallest, self.largest, *losses])

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
        return {
            name: each.tolist() if isinstance(each, Tensor) else each
            for name, each in vars(self).items()
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> Account:
        """The account that `state_dict` has saved."""
        vectors = {
            name: torch.tensor(each, dtype=torch.float64)
            for name, each in state.items()
            if isinstance(each, float | list)
        }
        return cls(**{**state, **vectors})


NUM_WAITING = 64
"""So many closed windows wait to be entered, where nobody asks for the accounts."""


class Ledger:
    """The accounts of a training's closed windows, one for each optimizer.

    Attributes:
        waiting: closed windows that are still to be entered: the optimizer's index, the
            window's numbers, and whether the samples of its batches were counted.
    """

    def __init__(self) -> None:
        self.waiting: list[tuple[int, WindowStats, bool]] = []
        self._accounts: dict[int, Account] = {}

    def enter(self) -> None:
        """Enter the windows that wait."""
        for index, stats, counts_samples in self.waiting:
            account = self._accounts.get(index)
            if account is None:
                account = Account.over(stats, counts_samples=counts_samples)
                self._accounts[index] = account
            else:
                account.add(stats, counts_samples=counts_samples)
        self.waiting.clear()

    def of(self, index: int = 0) -> Account | None:
        """The account of an optimizer; None before its first window has closed."""
        self.enter()
        return self._accounts.get(index)

    def state_dict(self) -> dict[int, dict[str, Any]]:
        self.enter()
        return {i: each.state_dict() for i, each in self._accounts.items()}

    def load_state_dict(self, state: Mapping[int, Mapping[str, Any]]) -> None:
        """Continue what `state_dict` has saved."""
        self._accounts = {i: Account.restored(each) for i, each in state.items()}
