"""Random numbers of some rows, as a pass over all rows has drawn them."""

from __future__ import annotations

import contextlib
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainkit.errors import TrainkitError

MOST_TIMES = 20_000

Key = tuple[str, int]


@dataclass(frozen=True)
class Drawn:
    """A draw of the pass over all rows.

    Attributes:
        shape: of what was drawn.
        options: what it was drawn from, such as a range.
    """

    shape: tuple[int, ...]
    options: tuple[Any, ...]


class Draws:
    """What every line draws for all rows, and what of it belongs to some rows.

    A number depends on the line that draws it, and on how often that line has drawn.
    Of a draw that has a dimension of rows, a part gets its rows. A line that draws once
    for each row gives a part the numbers of its rows. Other draws are shared.

    Args:
        num_rows: how many rows there are in all.

    Attributes:
        is_active: whether a pass runs.
        identity: whether permutations permute nothing.
        has_several: whether a draw has several entries for each row.
        are_apart: whether these stand apart, as where two views are concatenated.
        by_row: the lines that were replayed.
        unlike: the lines whose draws cannot be handed out by row.
    """

    of_micro_batch = ("_rows", "_counts", "_chunk", "_before")

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._rows: list[int] = []
        self._whole: dict[Key, Drawn] = {}
        self._times: dict[str, int] | None = None  # that the whole drew at a line
        self._shared: set[str] = set()  # lines that do not draw row by row
        self._counts: Counter[str] = Counter()
        self._chunk: Sequence[int] | None = None
        self._before: dict[int, Counter[str]] = {}  # what was counted before a call
        self.is_active = self.identity = self.are_apart = self.has_several = False
        self.by_row: set[str] = set()
        self.unlike: set[str] = set()

    @property
    def are_any(self) -> bool:
        """Whether the pass over all rows has drawn."""
        return bool(self._times)

    def begin(self, rows: Sequence[int]) -> None:
        """A pass over these rows begins."""
        self._rows = list(rows)
        self._counts, self._before = Counter(), {}
        self.is_active = True

    def end(self) -> bool:
        """The pass has succeeded; whether it must run again, as numbers went astray."""
        if self._times is None:
            self._times = dict(self._counts)
            return False
        learned = False
        for line, number in self._counts.items():
            times = self._times.get(line)
            each, rest = divmod(times or 0, self._num_rows)
            if line in self._shared or (not rest and number == each * len(self._rows)):
                continue
            if number == times:
                learned |= not rest
                self._shared.add(line)
            else:
                self.unlike.add(line)
        return learned

    @contextlib.contextmanager
    def of_chunk(self, call: Any, start: int, stop: int, of: int) -> Iterator[None]:
        """Some rows of a module's call draw what they have of the whole call's draws.

        Args:
            call: one of a pass; its chunks draw what it drew.
            start: the first row.
            stop: the row behind the last.
            of: how many rows the call has.
        """
        counted = self._counts
        before = self._before.setdefault(id(call), Counter(counted))
        self._counts, self._chunk = Counter(before), (start, stop, of)
        try:
            yield
        finally:
            self._counts, self._chunk = counted | self._counts, None

    def _of_chunk(
        self, chunk: Sequence[int], full: Tensor, asked: Sequence[int]
    ) -> Tensor | None:
        """What a chunk has of a draw for its whole call; None if that is not seen."""
        start, stop, of = chunk
        if full.ndim == len(asked):
            for d, size in enumerate(full.shape):
                if size * (stop - start) == asked[d] * of:
                    full = full.narrow(d, start * size // of, asked[d])
                    break
        return full if full.shape == tuple(asked) else None

    def key(self, line: str) -> Key:
        """Which of the line's draws over all rows the present one is."""
        number = self._counts[line]
        self._counts[line] += 1
        if number > MOST_TIMES:
            raise TrainkitError(
                f"training_step draws more than {MOST_TIMES} times by {line}: on a few "
                f"rows it may never find what it looks for"
            )
        each, rest = divmod((self._times or {}).get(line, 1), self._num_rows)
        if rest or not each or line in self._shared:
            return line, number
        position, within = divmod(number, each)
        if position < len(self._rows):
            number = self._rows[position] * each + within
        return line, number

    def scalar(self, line: str, options: tuple[Any, ...]) -> Key:
        """Which draw of one number this is; a number of another range is unlike."""
        key = self.key(line)
        whole = self._whole.setdefault(key, Drawn((), options))
        (self.by_row if whole.options == options else self.unlike).add(line)
        return key

    def draw(
        self,
        line: str,
        shape: Sequence[int],
        make: Callable[[list[int], int], Tensor],
        options: tuple[Any, ...] = (),
    ) -> Tensor:
        """Numbers of a shape, for the rows of this pass.

        Args:
            line: that draws them.
            shape: what is asked for.
            make: draws for a shape with a seed.
            options: what is drawn from; another one for a part cannot be replayed.
        """
        key = self.key(line)
        asked = tuple(shape)
        whole = self._whole.setdefault(key, Drawn(asked, options))
        if self._chunk is not None:
            full = make(list(whole.shape), seed_of(key))
            found = self._of_chunk(self._chunk, full, asked)
            (self.unlike if found is None else self.by_row).add(line)
            return make(list(asked), seed_of(key)) if found is None else found
        if whole.options != options or len(whole.shape) != len(asked):
            self.unlike.add(line)
            return make(list(asked), seed_of(key))
        dim = self._row_dimension(whole.shape, asked)
        others = [d for d in range(len(asked)) if d != dim]
        if any(asked[d] > whole.shape[d] for d in others) or (
            dim is None and asked != whole.shape
        ):
            self.unlike.add(line)
            return make(list(asked), seed_of(key))
        self.by_row.add(line)
        full = make(list(whole.shape), seed_of(key))
        if dim is not None:
            full = self._of_rows(full, dim)
        for d in others:
            full = full.narrow(d, 0, asked[d])
        return full

    def _row_dimension(self, whole: Sequence[int], asked: Sequence[int]) -> int | None:
        """The dimension that holds the rows, once or several times."""
        for d, (size, here) in enumerate(zip(whole, asked, strict=True)):
            times, rest = divmod(size, self._num_rows)
            is_several = not rest and times and here == times * len(self._rows)
            if is_several and (d == 0 or times == 1):
                return d
        return None

    def _of_rows(self, full: Tensor, dim: int) -> Tensor:
        shape = full.shape
        times = shape[dim] // self._num_rows
        self.has_several |= times > 1
        sizes = (times, self._num_rows) if self.are_apart else (self._num_rows, times)
        each = full.reshape(*shape[:dim], *sizes, *shape[dim + 1 :])
        at = torch.tensor(self._rows, device=full.device)
        rest = (len(self._rows) * times, *shape[dim + 1 :])
        chosen = each.index_select(dim + self.are_apart, at)
        return chosen.reshape(*shape[:dim], *rest)

    # ---- functions that draw for what they get ---------------------------------------

    def call_by_row(
        self, line: str, function: Callable[..., Tensor], tensors: Sequence[Tensor]
    ) -> Tensor | None:
        """A function of tensors that draws, called for each row with a seed of its own;
        None if the tensors have no rows."""
        key, number = self.key(line), len(self._rows)
        first = tensors[0]
        if not first.ndim or not first.shape[0] or first.shape[0] % number:
            self.unlike.add(line)
            return None
        times = first.shape[0] // number
        block = (times, *first.shape[1:])
        whole = self._whole.setdefault(key, Drawn(block, ()))
        if len(whole.shape) != len(block) or whole.shape[0] != times:
            self.unlike.add(line)
            return None
        self.by_row.add(line)
        shape = [max(pair) for pair in zip(whole.shape, block, strict=True)]
        found = []
        for position, row in enumerate(self._rows):
            begin = position * times
            own = [
                _widened(t[begin : begin + times], block, shape)
                if t.ndim and t.shape[0] == first.shape[0]
                else t
                for t in tensors
            ]
            with seeded(seed_of((f"{line} {key[1]}", row)), first.device):
                made = function(*own)
            for d, size in enumerate(block):
                if d < made.ndim and shape[d] != size and made.shape[d] == shape[d]:
                    made = made.narrow(d, 0, size)
            found.append(made)
        return torch.cat(found)


def _widened(tensor: Tensor, block: Sequence[int], shape: Sequence[int]) -> Tensor:
    """A row's block as long as in the whole; the last entry fills it up."""
    for d, size in enumerate(shape):
        if d < tensor.ndim and tensor.shape[d] == block[d] != size:
            at = torch.arange(size, device=tensor.device).clamp(max=block[d] - 1)
            tensor = tensor.index_select(d, at)
    return tensor


def seed_of(key: Key) -> int:
    """A seed that depends on the line and the number of its draw alone."""
    return zlib.crc32(f"{key[0]} {key[1]}".encode())


@contextlib.contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Torch's generators begin at a seed, and afterwards are as before."""
    is_cuda = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if is_cuda else []):
        torch.default_generator.manual_seed(seed)  # and no other device's
        if is_cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield
