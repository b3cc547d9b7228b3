"""What happens in calls of torch while a training step is measured."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

DROPOUTS = frozenset(
    "dropout dropout_ alpha_dropout alpha_dropout_ feature_dropout feature_dropout_ "
    "feature_alpha_dropout feature_alpha_dropout_ dropout1d dropout2d dropout3d".split()
)
NARROW = (torch.float32, torch.float16, torch.bfloat16)
TO_FLOAT = frozenset(("float", "half", "bfloat16"))
OTHER_DRAWS = frozenset(("randperm", "multinomial", "gumbel_softmax", "rrelu"))
DENOMINATORS = frozenset(("cross_entropy", "nll_loss"))


@dataclass
class Seen:
    """What was seen in the calls of one pass.

    Attributes:
        dropouts: the lines that drop out.
        draws: the lines that draw something for each row.
        unlike_draws: the lines whose draws cannot be handed out by row.
        denominators: what `cross_entropy` and its like have divided by, by line.
    """

    dropouts: set[str] = field(default_factory=set)
    draws: set[str] = field(default_factory=set)
    unlike_draws: set[str] = field(default_factory=set)
    denominators: dict[str, float] = field(default_factory=dict)


class MeasuredCalls(TorchFunctionMode):
    """Makes a pass over some rows comparable with a pass over all.

    - Arithmetic is in float64, also where the code asks for less.
    - Nothing drops out.
    - Random numbers are drawn for all rows, and these rows get theirs.

    Args:
        rows: the rows of this pass.
        num_rows: how many there are in all.
        in_double: whether narrower floats become float64.
        permutes: whether `torch.randperm` permutes; if not, it counts.
        shapes: of the draws for all rows, in order; the first pass adds them.

    Attributes:
        seen: what was seen so far.
    """

    def __init__(
        self,
        rows: Sequence[int],
        num_rows: int,
        *,
        in_double: bool,
        permutes: bool = True,
        shapes: list[list[int]],
    ) -> None:
        super().__init__()
        self._rows = list(rows)
        self._num_rows = num_rows
        self._in_double = in_double
        self._permutes = permutes
        self._shapes = shapes
        self._num_draws = 0
        self.seen = Seen()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in DROPOUTS:
            return self._without_dropout(func, args, kwargs)
        if name == "scaled_dot_product_attention":
            args = self._without_probability(args, kwargs, 4)
        elif name == "multi_head_attention_forward":
            args = self._without_probability(args, kwargs, 10)
        elif name in DENOMINATORS:
            self._see_denominator(name, args, kwargs)
        elif name in OTHER_DRAWS:
            self.seen.unlike_draws.add(f"{name} at {place()}")
            if name == "randperm" and not self._permutes:
                made = func(*args, **kwargs)
                return made.copy_(torch.arange(len(made)))
        elif name == "bernoulli" and kwargs.get("generator") is None:
            chance = args[0] if args else kwargs["input"]
            drawn = torch.empty_like(chance)
            uniform = self._drawn(drawn, lambda full: full.uniform_())
            return (uniform < chance).to(chance.dtype)
        draw = DRAWS.get(name)
        if draw is not None and kwargs.get("generator") is None:
            made = self._widened(func, name, args, kwargs)
            return self._drawn(made, lambda full: draw(full, args, kwargs))
        return self._widened(func, name, args, kwargs)

    def _widened(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        if not self._in_double:
            return func(*args, **kwargs)
        if kwargs.get("dtype") in NARROW:
            kwargs["dtype"] = torch.float64
        if name in TO_FLOAT:
            return args[0].double()
        args = tuple(_wide(value) for value in args)
        made = func(*args, **kwargs)
        if isinstance(made, Tensor) and made.dtype in NARROW and name in WIDENED:
            return made.double()
        return made

    # ---- dropout ---------------------------------------------------------------------

    def _without_dropout(self, func: Any, args: Any, kwargs: Any) -> Any:
        values = [*args[1:], *kwargs.values()]
        is_off = any(value is False for value in values[:2]) or 0.0 in values[:1]
        if not is_off:
            self.seen.dropouts.add(place())
        return args[0] if args else kwargs["input"]

    def _without_probability(self, args: Any, kwargs: Any, at: int) -> Any:
        given = args[at] if len(args) > at else kwargs.get("dropout_p", 0.0)
        if given:
            self.seen.dropouts.add(place())
        if len(args) > at:
            return (*args[:at], 0.0, *args[at + 1 :])
        kwargs["dropout_p"] = 0.0
        return args

    # ---- draws -----------------------------------------------------------------------

    def _drawn(self, made: Tensor, draw: Callable[[Tensor], Tensor]) -> Tensor:
        """What these rows get of a draw for all rows, which may be padded longer."""
        number, self._num_draws = self._num_draws, self._num_draws + 1
        dim = self._row_dimension(made)
        if dim is None:
            return made
        self.seen.draws.add(place())
        shape = list(made.shape)
        shape[dim : dim + 1] = [self._num_rows, made.shape[dim] // len(self._rows)]
        if number == len(self._shapes):
            self._shapes.append(shape)
        elif number < len(self._shapes) and len(self._shapes[number]) == len(shape):
            pairs = zip(shape, self._shapes[number], strict=True)
            shape = [max(pair) for pair in pairs]
        with torch.random.fork_rng(devices=_devices(made)):
            torch.manual_seed(number)
            full = draw(torch.empty(shape, dtype=made.dtype, device=made.device))
        at = torch.tensor(self._rows, device=made.device)
        values = full.index_select(dim, at)
        for each, size in enumerate(made.shape):
            if each != dim:
                values = values.narrow(each + (each > dim), 0, size)
        with torch.no_grad():
            return made.copy_(values.reshape(made.shape))

    def _row_dimension(self, made: Tensor) -> int | None:
        number = len(self._rows)
        if made.ndim and made.shape[0] and made.shape[0] % number == 0:
            return 0
        sizes = list(made.shape)
        return sizes.index(number) if number in sizes and number > 1 else None

    # ---- denominators ----------------------------------------------------------------

    def _see_denominator(self, name: str, args: Any, kwargs: Any) -> None:
        given = dict(zip(ORDER, args, strict=False)) | kwargs
        target, weight = given["target"], given.get("weight")
        if given.get("reduction", "mean") != "mean" or target.is_floating_point():
            return
        counted = target != given.get("ignore_index", -100)
        if weight is None:
            total = counted.sum()
        else:
            total = weight[target[counted]].double().sum()
        line = f"{name} at {place()}"
        self.seen.denominators[line] = float(total)


ORDER = ("input", "target", "weight", "size_average", "ignore_index", "reduce")


def _wide(value: Any) -> Any:
    return (
        torch.float64 if isinstance(value, torch.dtype) and value in NARROW else value
    )


WIDENED = frozenset(("to", "type", "type_as", "tensor", "as_tensor", "from_numpy"))


def _uniform(full: Tensor, args: Any, kwargs: Any) -> Tensor:
    return full.uniform_()


def _normal(full: Tensor, args: Any, kwargs: Any) -> Tensor:
    return full.normal_()


def _integers(full: Tensor, args: Any, kwargs: Any) -> Tensor:
    numbers = [value for value in args if isinstance(value, int)]
    high = kwargs.get("high", numbers[-1] if numbers else 1)
    low = kwargs.get("low", numbers[0] if len(numbers) > 1 else 0)
    return full.random_(int(low), int(high))


def _in_place(name: str) -> Callable[[Tensor, Any, Any], Tensor]:
    def draw(full: Tensor, args: Any, kwargs: Any) -> Tensor:
        return getattr(full, name)(*args[1:], **kwargs)

    return draw


DRAWS: dict[str, Callable[[Tensor, Any, Any], Tensor]] = {
    "rand": _uniform,
    "rand_like": _uniform,
    "randn": _normal,
    "randn_like": _normal,
    "randint": _integers,
    "randint_like": _integers,
    **{
        name: _in_place(name)
        for name in ("uniform_", "normal_", "exponential_", "random_", "log_normal_")
    },
}


def _devices(tensor: Tensor) -> list[Any]:
    return [tensor.device] if tensor.device.type == "cuda" else []


def place() -> str:
    """The innermost line that is not torch's or this file's, as file:line."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        file = frame.f_code.co_filename
        if file != __file__ and "/torch/" not in file and "\\torch\\" not in file:
            break
        frame = frame.f_back
    path = frame.f_code.co_filename.replace("\\", "/")
    return f"{'/'.join(path.split('/')[-2:])}:{frame.f_lineno}"
