"""Random numbers in a rehearsal: dropout is off, and noise is drawn by row."""

from __future__ import annotations

import inspect
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
from trainkit.lit.proof.report import NotMeasured

_DROPOUTS = {
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout,
    F.feature_alpha_dropout, torch.dropout, torch.dropout_, torch.alpha_dropout,
    torch.feature_dropout, torch.feature_alpha_dropout,
}  # fmt: skip

_BACKWARD = {Tensor.backward, torch.autograd.backward}

_BY_ROW = {
    torch.rand, torch.randn, torch.randint, torch.normal, torch.rand_like,
    torch.randn_like, torch.randint_like, torch.bernoulli, torch.poisson,
    Tensor.uniform_, Tensor.normal_, Tensor.bernoulli_, Tensor.exponential_,
    Tensor.random_, Tensor.bernoulli, Tensor.log_normal_, Tensor.cauchy_,
    Tensor.geometric_, torch.binomial,
    torch._standard_gamma, torch._sample_dirichlet,  # type: ignore[attr-defined]
}  # fmt: skip

_ALONG_A_ROW = {torch.multinomial, Tensor.multinomial, F.gumbel_softmax}
"""They draw for each row of a matrix; of a vector, or along the rows, for all."""

_DRAWS = _BY_ROW | _ALONG_A_ROW | {torch.randperm}

_WIDENED = {Tensor.float, Tensor.half, Tensor.bfloat16}
_NARROW = (torch.float32, torch.float16, torch.bfloat16)

_NOT_THEIRS = ("torch", "trainkit", "lightning", "pytorch_lightning")

SEED = 748_151_933
"""A seed that no training has."""


class Draws(TorchFunctionMode):
    """What a rehearsal makes of dropout, of random numbers and of narrow types.

    A tensor of random numbers whose first dimension is that of the rows is drawn for
    all rows, and a micro-batch gets those of its rows. What else is drawn differs
    between passes, as in training, and is noted with its file and line. A generator of
    the user's own gives what it gives: it may be seeded anew for each row.

    Args:
        rows_now: gives the rows of the micro-batch under way.
        dtype: in float64, narrower types that the module asks for become float64.
        shared: parameters that must not be written, by the address of their memory.
        by_row: for each place that draws, whether it draws by row. What is not there
            yet is noted by the number of rows.
        fixes: whether what is not by row is drawn alike in all passes.

    Attributes:
        has_dropout: whether some dropout was turned off.
        are_of_host: whether Python's or NumPy's generator was drawn from.
        unlike: the places of draws that are not by row, each with their shapes.
        seeds: for each place that draws from a generator of the user's own, its seeds.
    """

    def __init__(
        self,
        rows_now: Callable[[], tuple[Any, Sequence[int]] | None],
        dtype: torch.dtype,
        shared: dict[int, str],
        by_row: dict[str, set[bool]],
        *,
        fixes: bool = False,
    ) -> None:
        super().__init__()
        self._by_row, self._known = by_row, frozenset(by_row)
        self.has_dropout = self.are_of_host = False
        self.unlike: dict[str, set[torch.Size]] = {}
        self.seeds: dict[str, set[int]] = {}
        self._rows_now = rows_now
        self._widens, self._shared = dtype is torch.float64, shared
        self._micro_batch, self._num_calls, self._fixes = None, 0, fixes
        self._chunk, self._begun = slice(None), dict[Any, int]()

    @property
    def left_out(self) -> list[str]:
        """What another step would do otherwise, in words."""
        are_shared = bool(self.unlike) or self.are_of_host
        return ["dropout"] * self.has_dropout + ["random draws"] * are_shared

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
        before, chunk_before = self._num_calls, self._chunk
        self._num_calls = self._begun.setdefault(call, before)
        self._chunk = slice(chunk.start, chunk.stop) if chunk else slice(0, 0)
        try:
            yield
        finally:
            self._num_calls = max(before, self._num_calls) if chunk else before
            self._chunk = chunk_before

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _BACKWARD:  # in which forward passes may run again
            with self:
                return backward_in_modes(*args, **kwargs)
        if func in CHECKED:
            refuse_below_zero(func, args, kwargs)
        if func in _DROPOUTS:
            return self._undropped(func, args, kwargs)
        args, kwargs = self._attending(func, args, kwargs)
        if self._shared:
            self._refuse_writing(func, args)
        if self._widens:
            func, args, kwargs = _widened(func, args, kwargs)
        if func not in _DRAWS:
            return func(*args, **kwargs)
        if (own := kwargs.get("generator")) is not None:
            self.seeds.setdefault(_draw_of(func), set()).add(own.initial_seed())
            return func(*args, **kwargs)
        if _is_by_row(func, args, kwargs):
            return self._drawn(func, args, kwargs)
        return self._of_all(func, args, kwargs)

    def _of_all(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A draw that rows share."""
        if not self._fixes:
            found = func(*args, **kwargs)
        elif func is torch.randperm:
            found = torch.arange(*args[:1])
        else:
            with torch.random.fork_rng(devices=[]):
                seed_torch(SEED + self._num_calls)
                found = func(*args, **kwargs)
        if self._rows_now() is not None:
            # Any number of rows that stay where they are is fixed.
            shape = torch.Size() if func is torch.randperm else found.shape
            self.unlike.setdefault(_draw_of(func), set()).add(shape)
        return found

    def _undropped(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        names = "input", "p", "training" if func.__module__ != "torch" else "train"
        given = dict(zip(names, args, strict=False)) | kwargs
        drops = given.get("training", given.get("train", True))
        self.has_dropout |= bool(drops) and given.get("p", 0.5) > 0
        return given["input"]

    def _attending(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Arguments without the dropout of attention."""
        if func is F.scaled_dot_product_attention and any(args[4:5]):
            self.has_dropout, args = True, (*args[:4], 0.0, *args[5:])
        if kwargs.get("dropout_p"):
            self.has_dropout, kwargs = True, {**kwargs, "dropout_p": 0.0}
        return args, kwargs

    def _drawn(self, func: Any, args: Any, kwargs: Any) -> Any:
        found, now = func(*args, **kwargs), self._rows_now()
        if now is None or not isinstance(found, Tensor):
            return found
        place = _draw_of(func)
        number, rows = now
        if number != self._micro_batch:
            self._micro_batch, self._num_calls = number, 0
        rows = rows[self._chunk]
        self._num_calls += 1
        if not rows:
            return found
        is_by_row = found.ndim > 0 and found.shape[0] == len(rows)
        if place not in self._known:
            self._by_row.setdefault(place, set()).add(is_by_row)
        if not is_by_row or True not in self._by_row[place]:
            return self._of_all(func, args, kwargs)
        is_in_place = func.__name__.endswith("_")
        has_gradient = found.requires_grad and not is_in_place
        values = []
        with (
            torch.set_grad_enabled(has_gradient and torch.is_grad_enabled()),
            torch.random.fork_rng(devices=_devices(found)),
        ):
            for at, row in enumerate(rows):
                seed_torch(SEED + 8191 * self._num_calls + row)
                own = _of_row(func, args, kwargs, at, len(rows))
                values.append(_drawn_once(func, *own).clone())
            drawn = torch.cat(values)
            return drawn if has_gradient else found.copy_(drawn)

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


def _is_by_row(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether each row may have draws of its own."""
    if func not in _ALONG_A_ROW:
        return func is not torch.randperm
    of = args[0] if args else kwargs.get("input", kwargs.get("logits"))
    last = kwargs.get("dim", -1) in (-1, of.ndim - 1) and len(args) < 5
    return of.ndim > 1 and last


def _widened(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    if func in _WIDENED:
        return Tensor.double, args[:1], {}
    if kwargs.get("dtype") in _NARROW:
        kwargs = {**kwargs, "dtype": torch.float64}
    if func in (Tensor.to, Tensor.type) and any(each in _NARROW for each in args[1:]):
        wide = (torch.float64 if each in _NARROW else each for each in args[1:])
        args = (args[0], *wide)
    return func, args, kwargs


def _drawn_once(func: Any, args: Any, kwargs: Any) -> Tensor:
    """A draw, of which fewer columns would begin with the same numbers."""
    if func not in (torch.randn, torch.randn_like):
        return func(*args, **kwargs)
    even = torch.rand if func is torch.randn else torch.rand_like
    drawn = even(*args, **kwargs).clamp(1e-6, 1 - 1e-6)
    return torch.erfinv(2 * drawn - 1) * 2**0.5


def _of_row(
    func: Any, args: Any, kwargs: Any, place: int, number: int
) -> tuple[Any, Any]:
    """The arguments of a draw for one of several rows."""

    def one(value: Any) -> Any:
        if isinstance(value, Tensor):
            has_rows = value.ndim and len(value) == number
            return value[place : place + 1].clone() if has_rows else value
        if isinstance(value, tuple | list) and value and value[0] == number:
            return (1, *value[1:])
        return value

    args = tuple(map(one, args))
    if func in (torch.rand, torch.randn) and args and args[0] == number:
        args = (1, *args[1:])
    return args, {name: one(value) for name, value in kwargs.items()}


def _devices(tensor: Tensor) -> list[torch.device]:
    return [tensor.device] if tensor.is_cuda else []


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
