"""Random numbers in a rehearsal: dropout is off, and noise is drawn by row."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

from trainkit.core._compat import backward_in_modes
from trainkit.core.generators import seed_torch
from trainkit.lit.proof.bounds import CHECKED, refuse_below_zero
from trainkit.lit.proof.verdict import NotMeasured

_DROPOUTS = {
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout,
    F.feature_alpha_dropout, torch.dropout, torch.dropout_, torch.alpha_dropout,
    torch.feature_dropout, torch.feature_alpha_dropout,
}  # fmt: skip

_MULTINOMIAL = {torch.multinomial, Tensor.multinomial}
"""They draw for each row of a matrix; of a vector, for all."""

_DRAWS = _MULTINOMIAL | {
    torch.randperm, F.gumbel_softmax, torch.rand, torch.randn, torch.randint,
    torch.normal, torch.rand_like, torch.randn_like, torch.randint_like,
    torch.bernoulli, torch.poisson,
    Tensor.uniform_, Tensor.normal_, Tensor.bernoulli_, Tensor.exponential_,
    Tensor.random_, Tensor.bernoulli, Tensor.log_normal_, Tensor.cauchy_,
    Tensor.geometric_, torch.binomial,
    torch._standard_gamma, torch._sample_dirichlet,  # type: ignore[attr-defined]
}  # fmt: skip

_WIDENED = {Tensor.float, Tensor.half, Tensor.bfloat16}
_NARROW = (torch.float32, torch.float16, torch.bfloat16)

_NOT_THEIRS = ("torch", "trainkit", "lightning", "pytorch_lightning")

SEED = 748_151_933
"""A seed that no training has."""


class Draws(TorchFunctionMode):
    """What a rehearsal makes of dropout, of random numbers and of narrow types.

    Of a tensor of random numbers whose first dimension is that of the rows, each row
    gets those that it got when it was drawn for first. What else is drawn differs
    between passes, as in training, and is noted with its file and line. A generator of
    the user's own gives what it gives: it may be seeded anew for each row.

    Args:
        rows_now: gives the rows of the micro-batch under way.
        dtype: in float64, narrower types that the module asks for become float64.
        shared: parameters that must not be written, by the address of their memory.
        numbers: for each draw, the numbers of each row; None if it is not by row, as
            the first of all rehearsals has found: a part may have as many rows by
            chance. Later rehearsals get the same dict.
        fixes: whether what is not by row is drawn alike in all passes.

    Attributes:
        has_dropout: whether some dropout was turned off.
        unlike: the places of draws that are not by row, each with their shapes.
        seeds: for each place that draws from a generator of the user's own, its seeds.
    """

    def __init__(
        self,
        rows_now: Callable[[], tuple[Any, Sequence[int]]],
        dtype: torch.dtype,
        shared: dict[int, str],
        numbers: dict[tuple[str, int], dict[int, Tensor] | None],
        *,
        fixes: bool = False,
    ) -> None:
        super().__init__()
        self.has_dropout = False
        self.unlike: dict[str, set[torch.Size]] = {}
        self.seeds: dict[str, set[int]] = {}
        self._rows_now, self._numbers, self._fixes = rows_now, numbers, fixes
        self._widens, self._shared = dtype is torch.float64, shared
        self._micro_batch, self._times = None, Counter[str]()
        self._chunk, self._begun = slice(None), dict[Any, Counter[str]]()

    def turn_off(self, module: nn.Module) -> None:
        """Turn off the dropout of layers, whose calls no mode can see."""
        for each in module.modules():
            if isinstance(each, _DropoutNd):
                self.has_dropout |= each.p > 0
                each.p = 0.0
            elif isinstance(each, nn.MultiheadAttention | nn.RNNBase):
                self.has_dropout |= each.dropout > 0
                each.dropout = 0.0

    @contextmanager
    def of_chunk(self, call: Any, chunk: Any) -> Iterator[None]:
        """Within it, the rows of a chunk are drawn for, as when their call began.

        Args:
            call: of a submodule that runs in chunks.
            chunk: the places of its rows; None where the call is only looked at.
        """
        before, chunk_before = self._times.copy(), self._chunk
        self._times = self._begun.setdefault(call, before).copy()
        self._chunk = slice(chunk.start, chunk.stop) if chunk else slice(0, 0)
        try:
            yield
        finally:
            self._times = before | self._times if chunk else before
            self._chunk = chunk_before

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.backward:  # in which forward passes may run again
            with self:
                return backward_in_modes(*args, **kwargs)
        if func in CHECKED:
            refuse_below_zero(func, args, kwargs)
        if func in _DROPOUTS:
            return self._undropped(func, args, kwargs)
        if "dropout_p" in kwargs and kwargs["dropout_p"]:
            self.has_dropout, kwargs = True, {**kwargs, "dropout_p": 0.0}
        if self._shared:
            self._refuse_writing(func, args)
        if self._widens:
            func, args, kwargs = _widened(func, args, kwargs)
        if func not in _DRAWS:
            return func(*args, **kwargs)
        if (own := kwargs.get("generator")) is not None:
            self.seeds.setdefault(_draw_of(func), set()).add(own.initial_seed())
            return func(*args, **kwargs)
        found = func(*args, **kwargs)
        return self._drawn(found, func, args, kwargs)

    def _drawn(self, found: Any, func: Any, args: Any, kwargs: Any) -> Any:
        number, rows = self._rows_now()
        if number != self._micro_batch:
            self._micro_batch, self._times = number, Counter()
        rows = rows[self._chunk]
        if not rows or not isinstance(found, Tensor):
            return found
        place = _draw_of(func)
        self._times[place] += 1
        draw, is_by_row = (place, self._times[place]), _is_by_row(func, found, rows)
        known = self._numbers.setdefault(draw, {} if is_by_row else None)
        if is_by_row and known is not None:
            for row, own in zip(rows, found.data, strict=True):
                _give(known, row, own)
            return found
        if func is torch.randperm:
            # Any number of rows that stay where they are is fixed.
            self.unlike.setdefault(place, set()).add(torch.Size())
            return torch.arange(*args[:1]) if self._fixes else found
        self.unlike.setdefault(place, set()).add(found.shape)
        if not self._fixes:
            return found
        with torch.random.fork_rng(devices=[]):
            seed_torch(SEED + self._times.total())
            return func(*args, **kwargs)

    def _undropped(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        names = "input", "p", "training" if func.__module__ != "torch" else "train"
        given = dict(zip(names, args, strict=False)) | kwargs
        drops = given.get("training", given.get("train", True))
        self.has_dropout |= bool(drops) and given.get("p", 0.5) > 0
        return given["input"]

    def _refuse_writing(self, func: Any, args: Any) -> None:
        name = getattr(func, "__name__", "")
        if not name.endswith("_") or name.endswith("__") or not args:
            return
        for each in args[0] if isinstance(args[0], list | tuple) else args[:1]:
            if isinstance(each, Tensor) and each.layout is torch.strided:
                place = self._shared.get(each.untyped_storage().data_ptr())
                if place is not None and name != "requires_grad_":
                    raise WritesShared(place)


class WritesShared(NotMeasured):
    """A step writes a frozen parameter, which its copy must not share."""


def _widened(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    if func in _WIDENED:
        return Tensor.double, args[:1], {}
    if kwargs.get("dtype") in _NARROW:
        kwargs = {**kwargs, "dtype": torch.float64}
    if func in (Tensor.to, Tensor.type) and any(each in _NARROW for each in args[1:]):
        wide = (torch.float64 if each in _NARROW else each for each in args[1:])
        args = (args[0], *wide)
    return func, args, kwargs


def _is_by_row(func: Any, found: Tensor, rows: Sequence[int]) -> bool:
    """Whether each row may have drawn numbers of its own."""
    if func in (torch.randperm, F.gumbel_softmax):  # it may choose among rows
        return False
    least = 2 if func in _MULTINOMIAL else 1
    return found.ndim >= least and len(found) == len(rows)


def _give(known: dict[int, Tensor], row: int, own: Tensor) -> None:
    """Give a row the numbers that it got first, of which a shorter one gets fewer."""
    kept = known.get(row)
    if kept is not None and kept.ndim == own.ndim:
        sizes = zip(kept.shape, own.shape, strict=True)
        both = tuple(slice(min(each)) for each in sizes)
        own[both] = kept[both]
    if kept is None or own.numel() > kept.numel():
        known[row] = own.clone()


def _draw_of(func: Any) -> str:
    """A function, and the file and line of the user's that has called it."""
    frame = inspect.currentframe()  # inspect.stack() would look for all files of it
    while frame is not None:
        package = (frame.f_globals.get("__name__") or "").partition(".")[0]
        if package not in _NOT_THEIRS:
            path = Path(frame.f_code.co_filename)
            return f"{func.__name__} at {path.parent.name}/{path.name}:{frame.f_lineno}"
        frame = frame.f_back
    return f"{func.__name__} at an unknown line"
