"""The size of what each chunk of an inner cut adds to the gradient."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from trainkit.core.accumulator import Accumulator
from trainkit.core.inside.cut import no_shares
from trainkit.core.inside.forward import ChunkedForward
from trainkit.core.noise.norms import norms_of, squared, squared_norm
from trainkit.core.ranks import Ranks
from trainkit.core.window import Window, WindowStats, vector


class ChunkNorms:
    """The squared norms of what chunks of rows add to the gradients of submodules.

    With the inner cut a rank's whole loader batch has one backward pass, and its chunks
    are the micro-batches. Their weight is their rows. Each loader batch is compared
    with its own chunks, since what a parameter gets outside the submodule is no sum
    over chunks.

    Args:
        accumulator: of the windows.
        cuts: the submodules that run in chunks.

    Attributes:
        why_not: why nothing is measured, once that is known.
        parts: of the window that closed last: its sums on this rank.
    """

    def __init__(
        self, accumulator: Accumulator, cuts: Sequence[ChunkedForward]
    ) -> None:
        self._accumulator, self._cuts = accumulator, cuts
        self.why_not: str | None = None
        self.parts: Tensor | None = None
        self._sums: Tensor | None = None
        self._calls: list[_Call] = []
        self._is_open = self._is_resumed = False
        for index, cut in enumerate(cuts):
            cut.shares = partial(self._begin_call, index)

    def stop(self) -> None:
        """Look at the submodules no more, and forget the window."""
        for cut in self._cuts:
            cut.shares = no_shares
        self.parts = self._sums = None

    def begin(self) -> None:
        """The backward pass of a loader batch begins."""
        self._is_open, self._calls = True, []

    def _begin_call(self, index: int, num_rows: int) -> _Call | None:
        if not self._is_open:
            return None
        self._calls = [c for c in self._calls if c.is_over]  # or it ran out of memory
        call = _Call(index, num_rows)
        self._calls.append(call)
        return call

    def end(self) -> None:
        """It has ended."""
        self._is_open = False
        calls, self._calls = self._calls, []
        if not calls or self._is_unlike(calls):
            return
        totals = torch.stack([call.total for call in calls]).sum()
        squares = torch.stack([square for call in calls for square in call.squares])
        # The gradient of the loader batch's mean loss, times its rows.
        applied = self._accumulator.window.applied[-1]
        unit = self._accumulator.division.unit(totals.device) / applied
        rows = vector(calls[0].rows, totals.device)
        num = rows.sum()
        unit = (unit * num).square()
        row = [
            totals * unit,
            squares.sum() * unit,
            num**2,
            rows.square().sum(),
            num,
            num,
        ]
        sums = torch.stack(row)
        sums = torch.where(sums.isfinite().all(), sums, 0.0)
        self._sums = sums if self._sums is None else self._sums + sums

    def _is_unlike(self, calls: list[_Call]) -> bool:
        """Whether the chunks are not the batch's rows, each in one of them."""
        first, samples = calls[0], self._accumulator.window.last_samples
        names = [self._cuts[call.index].name for call in calls]
        if len(set(names)) < len(names):
            why = f"{names[0]} is called several times in a step"
        elif any(call.rows != first.rows for call in calls):
            why = f"{names[0]} and {names[1]} run in chunks of different rows"
        elif isinstance(samples, int | float) and samples != first.num_rows:
            why = f"{names[0]} gets {first.num_rows} rows of {samples:g} samples"
        else:
            return False
        self.why_not = f"{why}, so a sample may be in several chunks at once"
        return True

    def rewind(self, num_passes: int) -> None:
        """Return to the beginning of the window."""
        self._is_open = False
        if not num_passes:
            self._sums, self._is_resumed = None, False

    def close(self, window: Window, unit: Tensor) -> None:
        """The window ends."""
        is_whole = not self.why_not and (window.carried is None or self._is_resumed)
        sums = unit.new_zeros(6) if self._sums is None else self._sums.to(unit)
        self.parts = torch.cat([sums, torch.full_like(unit, is_whole)[None]])

    def row(
        self,
        stats: WindowStats,
        gradients: Sequence[Tensor],
        ranks: Ranks,
        scale: Tensor | float,
    ) -> Tensor:
        """The sums of the window that closed last, over all ranks; zeros if some of it
        was not seen, or nothing of it was finite."""
        assert self.parts is not None
        row = ranks.sum_(self.parts)
        is_good = (row[-1] == ranks.size) & (row[2] > 0)
        row[-1] = 1
        return torch.where(is_good, row, 0.0)

    def saved(self, ranks: Ranks, device: torch.device) -> Tensor:
        """The open window, for a checkpoint; each of these ranks must call this."""
        zeros = torch.zeros(6, dtype=torch.float64, device=device)
        own = zeros if self._sums is None else self._sums.to(zeros)
        return ranks.sum_(own.clone())[None].cpu()

    def restore(self, saved: Tensor, ranks: Ranks, device: torch.device) -> None:
        """Resume in the window that `saved` has saved."""
        self._sums = (saved[0] * (ranks.index == 0)).to(device)
        self._is_resumed = True


class _Call:
    """The chunks of one call, in its backward pass."""

    def __init__(self, index: int, num_rows: int) -> None:
        self.index, self.num_rows = index, num_rows
        self.rows: list[int] = []
        self.squares: list[Tensor] = []
        self.is_over = False
        self._norms: list[Tensor] = []

    def see(self, gradient: Tensor) -> None:
        self._norms.append(norms_of(gradient))

    def end_chunk(self, num_rows: int) -> None:
        self.rows.append(num_rows)
        self.squares.append(squared(self._norms))
        self._norms = []

    def end(self, gradients: Sequence[Tensor | None]) -> None:
        self.total = squared_norm(g for g in gradients if g is not None)
        self.is_over = True
