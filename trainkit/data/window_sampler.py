"""A batch sampler that plans each window's micro-batches over all ranks."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from torch import Tensor

from trainkit.core.plan.options import (
    check_whole_number,
    is_positive_number,
)
from trainkit.data.length_sampler import Batch, LengthSampler
from trainkit.data.row_sampler import of_all_ranks
from trainkit.data.window_plan import fitted, now, planned, rounds_needed
from trainkit.errors import TrainkitError

EPOCHS_TRIED, ROWS_TRIED = 10, 200_000
"""The number of micro-batches is enough for all windows of so many epochs, or rows."""
WINDOWS_TIMED = 8
"""How many windows are timed, after one in which the device becomes warm."""


class WindowSampler(LengthSampler):
    """Makes micro-batches of whole windows, so that no rank waits for another.

        plan = WindowSampler(lengths, window=512, tokens=4096, num_replicas=8)
        train = ResumableLoader(rows, batch_sampler=plan, collate_fn=PadCollate())
        Trainer(devices=8, accumulate_grad_batches=plan.micro_batches)

    A window has the next `window` rows of the epoch's order, over all ranks; the last
    one of an epoch has what is left. The plan decides only which of its rows share a
    micro-batch, and on which rank. So the steps do not depend on it. Every rank makes
    equally many micro-batches of nearly equal cost. Seed and epoch decide the order. A
    run resumes within a window, also on another number of ranks.

    Micro-batches differ in what they weigh: trainkit's strategies make them exact, and
    plain accumulation would not.

    Args:
        lengths: the lengths of the rows, in order, or a file of them, as
            `trainkit lengths` writes it.
        window: the rows of an optimizer step, over all ranks.
        tokens: the most tokens in a micro-batch, padding included.
        micro_batches: of a window, on each rank; default: as few as keep to `tokens`
            in ten epochs, or in 200,000 rows if that is less. A later window that
            exceeds `tokens` is warned of.
        num_replicas: the ranks that share the rows; default: those of the process
            group, or of the environment variable WORLD_SIZE, or 1.
        rank: which of them this is; default: that of the process group.
        flattened: whether micro-batches are flattened, as by `PackCollate`, so that
            there is no padding.
        cost: what a row costs beyond its length, times its length squared, for
            attention. "measured": found by the `ResumableLoader` from the times of an
            epoch's first windows, used some windows later, and saved with the run.
        shuffle: whether each epoch has its own order; if not, the data set's.
        seed: the seed of the orders.
        drop_last: leave out the last window if it lacks rows.
        process_group: the group of the ranks; default: all.
    """

    def __init__(
        self,
        lengths: Iterable[int] | Tensor | str | os.PathLike[str],
        *,
        window: int = 512,
        tokens: int = 4096,
        micro_batches: int | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        flattened: bool = False,
        cost: float | Literal["measured"] = 0.0,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        process_group: Any = None,
    ) -> None:
        check_whole_number("WindowSampler window", window)
        if cost not in ("measured", 0) and not is_positive_number(cost):
            raise TrainkitError(
                f"WindowSampler cost: must be a number of at least 0, the cost of a "
                f"row beyond its length, times its length squared, or 'measured'; "
                f"received {cost!r}."
            )
        super().__init__(
            lengths,
            tokens=tokens,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            process_group=process_group,
        )
        self.window, self.flattened = window, bool(flattened)
        self.num_ranks, self._rank = _ranks(num_replicas, rank, super().ranks[1])
        self._measures, self._has_warned = cost == "measured", False
        # The cost, and where it was measured: the found one, and from which epoch and
        # window on it is used.
        self._cost: list[Any] = [0.0 if cost == "measured" else float(cost)]
        self._lengths_at: dict[int, list[int]] = {}  # by position, until they train
        self._times: list[tuple[float, ...]] = []
        self._windows_timed = 0
        self._begun: list[Any] = []  # epoch, window, micro-batches and rows read
        if micro_batches is not None:
            check_whole_number("WindowSampler micro_batches", micro_batches)
        self.micro_batches = micro_batches or self._needed()
        least = self.num_ranks * self.micro_batches
        if window < least:
            raise TrainkitError(
                f"WindowSampler window: must have a row for each of {least} "
                f"micro-batches, {self.micro_batches} on each of {self.num_ranks} "
                f"ranks, received {window}. Raise window or tokens."
            )

    @property
    def ranks(self) -> tuple[int, int]:
        """This rank's index, and how many ranks share the rows."""
        if self._rank is not None:
            return self._rank, self.num_ranks
        rank, number = super().ranks
        if number != self.num_ranks:
            raise TrainkitError(
                f"WindowSampler num_replicas: was {self.num_ranks} when the windows "
                f"were planned, and {number} ranks read them. Give "
                f"num_replicas={number}."
            )
        return rank, number

    @property
    def gives_fillers(self) -> bool:
        full, left = divmod(len(self.lengths), self.window)
        return self.fills and not self.leaves_out_last and 0 < left < self.num_ranks

    def described(self) -> dict[str, Any]:
        return {"window": self.window, **super().described()}

    def plan(self, position: int) -> dict[str, Any]:
        """How windows are cut, and what is read of one that is not over."""
        plan = {**self._options(), "begun": self._begun, "read": []}
        window, inside = divmod(position, self.micro_batches)
        if inside and position < self.end:
            rounds = self._planned(self._order(), window)[:inside]
            _, before = self._begun_of(window)
            read = [row for each in rounds for batch in each for row in batch]
            plan["read"] = [*before, *read]
        return {"plan": plan}

    def adapted(self, state: dict[str, Any]) -> dict[str, Any]:
        """A state whose position counts this plan's micro-batches."""
        if "plan" not in state:
            return state  # another sampler's, at the end of an epoch
        old, position = state["plan"], state["batches"]
        if self._measures:
            self._cost = [*old["cost"]]
        window, inside = divmod(position, old["micro_batches"])
        if position >= state["end"]:
            position = self.end
        elif self._options() == {name: old[name] for name in self._options()}:
            self._begun = old["begun"]
        else:
            position = window * self.micro_batches
            if inside:
                position += self._begin(window, old["read"])
        plan = {**old, **self._options(), "begun": self._begun}
        return {**state, "batches": position, "end": self.end, "plan": plan}

    def _options(self) -> dict[str, Any]:
        return {
            "ranks": self.num_ranks,
            "tokens": self.tokens,
            "flattened": self.flattened,
            "cost": [*self._cost],
            "micro_batches": self.micro_batches,
        }

    def _begin(self, window: int, read: list[int]) -> int:
        """Plan what is left of a window that began with another plan.

        Returns:
            how many of its micro-batches count as read: at least one.
        """
        rounds = self._rounds_of(window)
        rows = set(self._rows_of(self._order(), window)) - {*read}
        most = min(rounds - 1, len(rows) // self.num_ranks)
        if most < 1:
            raise TrainkitError(
                f"WindowSampler micro_batches: of a window that was stopped after "
                f"{len(read)} rows {len(rows)} are left, too few to be shared anew by "
                f"{self.num_ranks} ranks in {rounds} micro-batches. Resume on as many "
                f"ranks as before, or from a checkpoint between two windows."
            )
        needed = rounds_needed(
            [self.lengths[row] for row in rows],
            num_ranks=self.num_ranks,
            tokens=self.tokens,
            flattened=self.flattened,
        )
        done = rounds - min(needed, most)
        self._begun = [self.epoch, window, done, read]
        return done

    def _begun_of(self, window: int) -> tuple[int, list[int]]:
        """The micro-batches and rows of a window that were read with another plan."""
        if not self._begun or [self.epoch, window] != self._begun[:2]:
            return 0, []
        return self._begun[2], self._begun[3]

    # ---- the measured cost -----------------------------------------------------------

    @property
    def _is_measuring(self) -> bool:
        return self._measures and len(self._cost) == 1

    def _attention(self, window: int) -> float:
        """The cost of a squared length with which to plan a window."""
        first, *found = self._cost
        return found[0] if found and [self.epoch, window] >= found[1:] else first

    @contextmanager
    def timed(self, position: int, ahead: int) -> Iterator[None]:
        """A context in which the micro-batch before a position trains; the loader reads
        so many ahead of it."""
        if not self._is_measuring:
            yield
            return
        lengths = self._lengths_at.pop(position, None)  # None: timed by another pass
        window, nth = divmod(position - 1, self.micro_batches)
        later = [self.epoch, window + 2 + ahead // self.micro_batches]
        closes, began = nth + 1 == self.micro_batches, now()
        yield
        # Between two windows there are validation, checkpoints and the optimizer.
        counts = self._windows_timed and (not closes or self.micro_batches == 1)
        if counts and lengths is not None:
            squares = sum(length**2 for length in lengths)
            self._times.append((sum(lengths), squares, now() - began))
        self._windows_timed += closes
        if closes and self._windows_timed > WINDOWS_TIMED:
            of_ranks = of_all_ranks(self._times, self.process_group)  # all find one
            found = fitted([each for times in of_ranks for each in times])
            self._cost[1:] = [found, *later]

    # ---- rounds ----------------------------------------------------------------------

    def __len__(self) -> int:
        """How many micro-batches each rank is given in an epoch."""
        return sum(self._rounds_of(window) for window in self._windows())

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        for position, batch in enumerate(super().__iter__(), self.start + 1):
            if self._is_measuring:
                self._lengths_at[position] = self._computed(batch)
            yield batch

    def rounds(self, start: int) -> Iterator[list[Batch]]:
        order = self._order()
        first, inside = divmod(start, self.micro_batches)
        for window in self._windows()[first:]:
            yield from self._planned(order, window)[inside:]
            inside = 0

    def _windows(self) -> range:
        full, left = divmod(len(self.lengths), self.window)
        return range(full + bool(left and not self.leaves_out_last))

    def _order(self) -> list[int]:
        return self.permuted(len(self.lengths))

    def _rows_of(self, order: list[int], window: int) -> list[int]:
        """The rows that a window has, in the epoch's order."""
        return order[window * self.window : (window + 1) * self.window]

    def _rounds_of(self, window: int) -> int:
        """How many micro-batches of a window each rank has: the last window may have
        too few rows for as many as the others."""
        num_rows = min(self.window, len(self.lengths) - window * self.window)
        most = num_rows // self.num_ranks
        return max(min(self.micro_batches, most), 1)

    def _planned(self, order: list[int], window: int) -> list[list[Batch]]:
        rows = self._rows_of(order, window)
        lacking = self.num_ranks - len(rows)
        if lacking > 0:
            why = f"the last window lacks {lacking}"
            return [[*([row] for row in rows), *self._fillers(lacking, why)]]
        done, read = self._begun_of(window)
        rows = [row for row in rows if row not in read]
        found = planned(
            [self.lengths[row] for row in rows],
            num_ranks=self.num_ranks,
            rounds=self._rounds_of(window) - done,
            tokens=self.tokens,
            attention=self._attention(window),
            flattened=self.flattened,
        )
        rounds = [[[rows[n] for n in batch] for batch in each] for each in found]
        self._warn_of_longest(rounds, window)
        return [*([[]] * self.num_ranks for _ in range(done)), *rounds]

    def _warn_of_longest(self, rounds: list[list[Batch]], window: int) -> None:
        if self._has_warned or self.ranks[0] != 0:
            return
        longest = max(sum(self._computed(batch)) for each in rounds for batch in each)
        if longest > self.tokens:
            self._has_warned = True
            warnings.warn(
                f"WindowSampler tokens: window {window} of epoch {self.epoch} has a "
                f"micro-batch of {longest:,} tokens, above {self.tokens:,}, since each "
                f"rank makes {len(rounds)} micro-batches of it. The step is exact. If "
                f"memory does not suffice, give micro_batches="
                f"{self.micro_batches + 1}.",
                stacklevel=2,
            )

    def _computed(self, batch: Batch) -> list[int]:
        """The lengths of rows in a micro-batch, padding included."""
        lengths = [self.lengths[row] for row in batch]
        return lengths if self.flattened else [max(lengths)] * len(lengths)

    def _needed(self) -> int:
        """The micro-batches of a window with which none of those tried exceeds."""
        most, left = 1, ROWS_TRIED // self.window + 1
        for epoch in range(EPOCHS_TRIED if self.shuffle else 1):
            self.epoch = epoch
            order = self._order() if left else []
            for window in self._windows()[:left]:
                needed = rounds_needed(
                    [self.lengths[row] for row in self._rows_of(order, window)],
                    num_ranks=self.num_ranks,
                    tokens=self.tokens,
                    flattened=self.flattened,
                )
                most, left = max(most, needed), left - 1
        self.epoch = 0
        return most


def _ranks(
    num_replicas: int | None, rank: int | None, in_group: int
) -> tuple[int, int | None]:
    """How many ranks share the rows, and which this is, if it is said."""
    if num_replicas is None:
        alone = in_group == 1
        num_replicas = int(os.environ.get("WORLD_SIZE", 1)) if alone else in_group
    check_whole_number("WindowSampler num_replicas", num_replicas)
    if rank is not None and rank not in range(num_replicas):
        raise TrainkitError(
            f"WindowSampler rank: must be below num_replicas={num_replicas}, received "
            f"{rank!r}."
        )
    return num_replicas, rank
