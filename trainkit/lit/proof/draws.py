"""Random numbers in a rehearsal: dropout is off, and rows keep the noise they had."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

from trainkit.core._compat import backward_in_modes, transform
from trainkit.core.nested import tensors
from trainkit.lit.proof.report import NotMeasured

_DROPOUTS = {
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout,
    F.feature_alpha_dropout, torch.dropout, torch.dropout_, torch.alpha_dropout,
    torch.feature_dropout, torch.feature_alpha_dropout,
}  # fmt: skip

_STOCHASTIC_DEPTH = ("DropPath", "StochasticDepth")
"""Layers of timm, transformers and torchvision that drop whole branches of rows."""

_BACKWARD = {Tensor.backward, torch.autograd.backward}

_DRAWS = {
    torch.rand, torch.randn, torch.randint, torch.normal, torch.rand_like,
    torch.randn_like, torch.randint_like, torch.bernoulli, torch.poisson,
    torch.randperm, torch.multinomial, torch.binomial,
    Tensor.uniform_, Tensor.normal_, Tensor.bernoulli_, Tensor.exponential_,
    Tensor.random_, Tensor.bernoulli, Tensor.log_normal_, Tensor.cauchy_,
    Tensor.geometric_, Tensor.multinomial, F.gumbel_softmax,
    torch._standard_gamma, torch._sample_dirichlet,  # type: ignore[attr-defined]
}  # fmt: skip

_OF_A_TENSOR = {Tensor.__getitem__} | {
    getattr(owner, name + end)
    for name in ("gather", "index_select", "scatter", "scatter_add", "index_add")
    for owner, end in ((torch, ""), (Tensor, ""), (Tensor, "_"))
    if hasattr(owner, name + end)
}
_IGNORE = {F.cross_entropy, F.nll_loss}
INDEXING = _OF_A_TENSOR | _IGNORE | {
    F.embedding, F.embedding_bag, F.one_hot, F.multi_margin_loss, F.ctc_loss,
}  # fmt: skip
"""The functions that take indices, some of them for the entries of their first."""

_WIDENED = {Tensor.float, Tensor.half, Tensor.bfloat16}
_NARROW = (torch.float32, torch.float16, torch.bfloat16)

_CLOSE = {torch.float64: 1e-9, torch.float32: 1e-4}

_NOT_THEIRS = ("torch", "trainkit", "lightning", "pytorch_lightning")

SEED = 748_151_933
"""A seed that no training has."""


@dataclass
class Noted:
    """What the first rehearsal has drawn.

    Attributes:
        place: the function, and the file and line of the user's that has called it.
        rows: that were drawn for.
        drawn: the numbers.
        inputs: tensors and whole numbers that say what is drawn.
    """

    place: str
    rows: Sequence[int]
    drawn: Tensor
    inputs: list[Any]

    @property
    def is_by_row(self) -> bool:
        """Whether each row has numbers of its own."""
        return self.drawn.ndim > 0 and len(self.drawn) == len(self.rows)

    def of(self, rows: Sequence[int], like: Noted) -> Tensor | None:
        """The numbers of some rows; None if another draw is not one for these rows."""
        if like.place != self.place or len(like.inputs) != len(self.inputs):
            return None
        places = [self.rows.index(row) for row in rows]
        for first, own in zip(self.inputs, like.inputs, strict=True):
            if isinstance(first, Tensor) and isinstance(own, Tensor):
                first = _rows_of(first, places, len(self.rows), own.shape)
                if first is None or not alike(first, own):
                    return None
            elif first != own:
                return None
        if not self.is_by_row and len(rows) < len(self.rows):
            return None
        return _rows_of(self.drawn, places, len(self.rows), like.drawn.shape)


class Draws(TorchFunctionMode):
    """What a rehearsal makes of dropout, of random numbers and of narrow types.

    The first rehearsal, which has all rows in one micro-batch, notes each draw by its
    number. A micro-batch of a later one gets the numbers of its rows, where rows come
    first. What else is drawn differs between passes, as in training, and is noted with
    its file and line, as is what a generator of the user's own gives.

    Args:
        rows_now: gives the rows of the micro-batch under way.
        dtype: in float64, narrower types that the module asks for become float64.
        shared: parameters that must not be written, by the address of their memory.
        noted: the draws of the first rehearsal, by their number.
        ignored: the label by which rows were made to end, which is no index.

    Attributes:
        has_dropout: whether some dropout was turned off.
        unlike: the places of draws that are not by row.
    """

    def __init__(
        self,
        rows_now: Callable[[], tuple[Any, Sequence[int]]],
        dtype: torch.dtype,
        shared: dict[int, str],
        noted: dict[int, Noted],
        *,
        ignored: int | None = None,
    ) -> None:
        super().__init__()
        self.has_dropout, self.unlike = False, set[str]()
        self._rows_now, self._noted, self._ignored = rows_now, noted, ignored
        self._widens, self._shared = dtype is torch.float64, shared
        self._micro_batch, self._num_calls = None, 0

    @property
    def left_out(self) -> list[str]:
        """What another step would do otherwise, in words."""
        are_unlike = bool(self.unlike)
        return ["dropout"] * self.has_dropout + ["random draws"] * are_unlike

    def turn_off(self, module: nn.Module) -> None:
        """Turn off the dropout of layers, whose calls no mode can see."""
        for each in module.modules():
            if isinstance(each, _DropoutNd):
                self.has_dropout |= each.p > 0
                each.p = 0.0
            elif isinstance(each, nn.MultiheadAttention | nn.RNNBase):
                self.has_dropout |= each.dropout > 0
                each.dropout = 0.0
            elif type(each).__name__.endswith(_STOCHASTIC_DEPTH):
                for name in {"drop_prob", "p"} & vars(each).keys():
                    self.has_dropout |= bool(vars(each)[name])
                    vars(each)[name] = 0.0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _BACKWARD:  # in which forward passes may run again
            with self:
                return backward_in_modes(*args, **kwargs)
        if self._ignored is not None and func in INDEXING:
            refuse_ignored(func, args, kwargs, self._ignored)
        if func in _DROPOUTS:
            return self._undropped(func, args, kwargs)
        args, kwargs = self._attending(func, args, kwargs)
        if self._shared:
            self._refuse_writing(func, args)
        if self._widens:
            func, args, kwargs = _widened(func, args, kwargs)
        if func not in _DRAWS:
            return func(*args, **kwargs)
        return self._drawn(func, args, kwargs)

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
        """A draw, in which rows have the numbers that they had in the first one."""
        found, (micro_batch, rows) = func(*args, **kwargs), self._rows_now()
        if transform() is not None:
            self.unlike.add(_draw_of(func))
            return found
        if micro_batch != self._micro_batch:
            self._micro_batch, self._num_calls = micro_batch, 0
        self._num_calls += 1
        inputs = [] if func.__name__.endswith("_like") else _inputs(args, kwargs, found)
        own = Noted(_draw_of(func), rows, found.detach().clone(), inputs)
        first = self._noted.get(self._num_calls)
        if first is None or not {*rows} <= {*first.rows}:
            first = self._noted[self._num_calls] = own
        has_gradient = found.requires_grad and not func.__name__.endswith("_")
        is_their_own = kwargs.get("generator") is not None
        numbers = None if has_gradient or is_their_own else first.of(rows, own)
        if numbers is None or not first.is_by_row:
            self.unlike.add(own.place)
        if numbers is None:
            return found
        with torch.no_grad():
            return found.copy_(numbers)

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


def refuse_ignored(func: Any, args: Any, kwargs: Any, ignored: int) -> None:
    """Refuse a label that does not count as an index: on a GPU, that ends the process's
    CUDA context, and so the training; `ctc_loss` writes outside of its memory.

    Within a transform of torch.func nothing can be read, and so nothing is refused.

    Raises:
        IndexError: as torch itself on the CPU, for most functions.
    """
    if transform() is not None:
        return
    least = ignored + 1 if func is Tensor.__getitem__ else 0
    for each in tensors([args[func in _OF_A_TENSOR :], kwargs]):
        is_whole = not (each.is_floating_point() or each.is_complex())
        if not is_whole or each.dtype is torch.bool or not each.numel():
            continue
        if func in _IGNORE:
            own = args[4] if len(args) > 4 else kwargs.get("ignore_index", -100)
            each = each.where(each != own, 0)
        if int(each.min()) < min(least, 0):
            raise IndexError(f"{func.__name__}: got a label that does not count")


def _inputs(args: Any, kwargs: Any, found: Tensor) -> list[Any]:
    """What says which numbers are drawn: tensors, and the bounds of whole ones."""
    given = [each for each in tensors([args, kwargs]) if each is not found]
    bounds = [each for each in (*args, *kwargs.values()) if type(each) is int]
    is_whole = not (found.is_floating_point() or found.is_complex())
    return [*(each.detach().clone() for each in given), *(bounds if is_whole else [])]


def alike(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape are equal, up to rounding."""
    close = _CLOSE.get(one.dtype, 1e-2)
    one, other = one.double(), other.double()
    finite = torch.isfinite(one) & torch.isfinite(other)
    size = one[finite].abs().max() if finite.any() else torch.tensor(0.0)
    return bool(((one - other)[finite].abs() <= close * (size + 1e-6)).all())


def _rows_of(
    first: Tensor, places: Sequence[int], number: int, shape: torch.Size
) -> Tensor | None:
    """A tensor's entries of some of a number of rows, cut to a width; as it is if it
    has that shape and not their number; None if it has another one."""
    if first.ndim == 0 or len(first) != number:
        return first if first.shape == shape else None
    sizes = zip(first.shape[1:], shape[1:], strict=False)
    fits = first.ndim == len(shape) and all(one >= other for one, other in sizes)
    if not fits or shape[0] != len(places):
        return None
    return first[list(places)][tuple(slice(size) for size in shape)]


def _widened(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    if func in _WIDENED:
        return Tensor.double, args[:1], {}
    if kwargs.get("dtype") in _NARROW:
        kwargs = {**kwargs, "dtype": torch.float64}
    if func in (Tensor.to, Tensor.type) and any(each in _NARROW for each in args[1:]):
        wide = (torch.float64 if each in _NARROW else each for each in args[1:])
        args = (args[0], *wide)
    return func, args, kwargs


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
