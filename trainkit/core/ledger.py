"""What the closed windows of a training add up to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
    def of(cls, windows: Sequence[WindowStats], *, counts_samples: bool) -> Account:
        """The account of windows that follow one another, by a few operations."""
        newest = windows[-1]
        table = torch.stack([each.totals.to(newest.totals) for each in windows])
        weights = table[:, WEIGHT]
        return cls(
            len(windows),
            counts_samples,
            newest.reduction,
            sums=table.sum(0),
            smallest=weights.amin(),
            largest=weights.amax(),
            first=table[0],
            newest=table[-1],
        )

    def then(self, later: Account) -> Account:
        """The account of these windows and of later ones."""
        to = later.sums
        return replace(
            later,
            num_windows=self.num_windows + later.num_windows,
            counts_samples=self.counts_samples and later.counts_samples,
            sums=self.sums.to(to) + later.sums,
            smallest=torch.minimum(self.smallest.to(to), later.smallest),
            largest=torch.maximum(self.largest.to(to), later.largest),
            first=self.first,
        )

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
        by_index: dict[int, list[WindowStats]] = {}
        for index, stats, _ in self.waiting:
            by_index.setdefault(index, []).append(stats)
        for index, windows in by_index.items():
            are_counted = all(c for i, _, c in self.waiting if i == index)
            later = Account.of(windows, counts_samples=are_counted)
            before = self._accounts.get(index)
            self._accounts[index] = later if before is None else before.then(later)
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
