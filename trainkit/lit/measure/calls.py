"""What happens in calls of torch while a training step is measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from trainkit.lit.measure.denominators import Denominators
from trainkit.lit.measure.draws import Draws, seed_of, seeded
from trainkit.lit.measure.place import place

DROPOUTS = frozenset(
    "dropout dropout_ alpha_dropout alpha_dropout_ feature_dropout feature_dropout_ "
    "feature_alpha_dropout feature_alpha_dropout_ dropout1d dropout2d dropout3d".split()
)
NARROW = (torch.float32, torch.float16, torch.bfloat16)
TO_FLOAT = frozenset(("float", "half", "bfloat16"))
ACROSS_ROWS = frozenset(("randperm",))


@dataclass
class Seen:
    """What was seen in the calls of one pass.

    Attributes:
        dropouts: the lines that drop out.
        hooks: the lines that register a hook for a gradient.
        denominators: what its means and quotients have divided by, by line.
        is_narrow: whether something was computed in less than the width asked for, as
            within an autocast of the module's own.
    """

    dropouts: set[str] = field(default_factory=set)
    hooks: set[str] = field(default_factory=set)
    denominators: Denominators = field(default_factory=Denominators)
    is_narrow: bool = False


class MeasuredCalls(TorchFunctionMode):
    """Makes a pass over some rows comparable with a pass over all.

    - Arithmetic is in one width, also where the code asks for less.
    - Nothing drops out.
    - Random numbers are drawn for all rows, and these rows get theirs.

    Args:
        dtype: what narrower floats become; None leaves them as they are.
        draws: replays what was drawn for all rows.
        without_hooks: whether hooks of gradients do nothing.

    Attributes:
        seen: what was seen so far.
    """

    def __init__(
        self, *, dtype: torch.dtype | None, draws: Draws, without_hooks: bool = False
    ) -> None:
        super().__init__()
        self._without_hooks = without_hooks
        self._dtype, self._draws = dtype, draws
        self.seen = Seen()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if not self._draws.is_active:  # a probe of other rows
            return func(*args, **kwargs)
        if name in DROPOUTS:
            return self._without_dropout(args, kwargs)
        if name == "scaled_dot_product_attention":
            args = self._without_probability(args, kwargs, 4)
        elif name == "multi_head_attention_forward":
            args = self._without_probability(args, kwargs, 10)
        elif name in ACROSS_ROWS:
            return self._permutation(func, args, kwargs)
        elif name == "register_hook":
            self.seen.hooks.add(f"{name} at {place()}")
            if self._without_hooks:
                return func(args[0], _keep)
        elif name in BY_ROW or name in DRAWS or name.startswith("bernoulli"):
            return self._replayed(func, name, args, kwargs)
        self.seen.denominators.see(name, args, kwargs)
        return self._widened(func, name, args, kwargs)

    def _replayed(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """What these rows get of a draw; within vmap, what it draws by itself."""
        try:
            if name in BY_ROW:
                return self._called_by_row(func, name, args, dict(kwargs))
            if name not in DRAWS:
                return self._bernoulli(name, args, kwargs)
            return self._drawn_alike(func, name, args, dict(kwargs))
        except RuntimeError as error:
            if "vmap" not in str(error):
                raise
            self._draws.unlike.add(f"{name} at {place()}")
            return self._widened(func, name, args, kwargs)

    def _drawn_alike(self, func: Any, name: str, args: Any, kwargs: Any) -> Tensor:
        """A draw of numbers that are all drawn in one way."""
        kwargs.pop("generator", None)
        made = self._widened(func, name, args, kwargs)
        # The numbers that rand and randn get are the shape.
        given = () if name in ("rand", "randn") else (*args, *kwargs.values())
        numbers = tuple(each for each in given if isinstance(each, int | float))
        draw = DRAWS[name]
        return self._drawn(name, made, lambda full: draw(full, args, kwargs), numbers)

    def _widened(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        wide = self._dtype
        if wide is None:
            return func(*args, **kwargs)
        if wider := wide_for(kwargs.get("dtype"), wide):
            kwargs["dtype"] = wider
        if name in TO_FLOAT:
            return args[0].to(wide)
        args = tuple(
            value if (w := wide_for(value, wide)) is None else w for value in args
        )
        made = func(*args, **kwargs)
        if isinstance(made, Tensor) and (wider := wide_for(made.dtype, wide)):
            if name in WIDENED:
                return made.to(wider)
            self.seen.is_narrow = True
        return made

    # ---- dropout ---------------------------------------------------------------------

    def _without_dropout(self, args: Any, kwargs: Any) -> Any:
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

    def _drawn(
        self,
        name: str,
        made: Tensor,
        draw: Callable[[Tensor], Tensor],
        options: tuple[Any, ...] = (),
    ) -> Tensor:
        """What these rows get of a draw for all rows, which may be padded longer."""

        def make(shape: list[int], seed: int) -> Tensor:
            # In float64 always, so that narrower arithmetic gets these numbers too.
            wide = torch.float64 if made.is_floating_point() else made.dtype
            wide = made.dtype if made.is_mps else wide
            with seeded(seed, made.device):
                return draw(torch.empty(shape, dtype=wide, device=made.device))

        line = f"{name} at {place()}"
        values = self._draws.draw(line, made.shape, make, options)
        with torch.no_grad():
            return made.copy_(values)

    def _bernoulli(self, name: str, args: Any, kwargs: Any) -> Tensor:
        given = args[0] if args else kwargs["input"]
        chance = given
        if name == "bernoulli_":
            chance = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
        uniform = self._drawn(name, torch.empty_like(given), lambda t: t.uniform_())
        drawn = (uniform < chance).to(given.dtype)
        return given.copy_(drawn) if name == "bernoulli_" else drawn

    def _permutation(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        line = f"{func.__name__} at {place()}"
        self._draws.unlike.add(line)
        kwargs.pop("generator", None)
        with seeded(seed_of(self._draws.key(line)), torch.device("cpu")):
            made = func(*args, **kwargs)
        return made.copy_(torch.arange(len(made))) if self._draws.identity else made

    def _called_by_row(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """A draw for each entry of what it gets, such as a chance or a mean."""
        kwargs.pop("generator", None)
        given = (*args, *kwargs.values())
        if name == "normal" and not any(isinstance(each, Tensor) for each in given):
            size = kwargs.pop("size", args[2] if len(args) > 2 else ())
            mean, std = (*args[:2], *kwargs.values())[:2]
            made = torch.empty(size, device=kwargs.get("device"))
            return self._drawn(name, made, lambda full: full.normal_(mean, std))
        if name == "multinomial" and args and args[0].ndim == 1:
            self._draws.unlike.add(f"{name} at {place()}")
            return func(*args, **kwargs)
        where = [i for i, each in enumerate(args) if isinstance(each, Tensor)]
        named = [k for k, each in kwargs.items() if isinstance(each, Tensor)]

        def call(*tensors: Tensor) -> Tensor:
            own, options = list(args), dict(kwargs)
            for at, tensor in zip((*where, *named), tensors, strict=True):
                if isinstance(at, int):
                    own[at] = tensor
                else:
                    options[at] = tensor
            return func(*own, **options)

        tensors = [*(args[i] for i in where), *(kwargs[k] for k in named)]
        made = self._draws.call_by_row(f"{name} at {place()}", call, tensors)
        return call(*tensors) if made is None else made


def _keep(gradient: Tensor) -> None:
    """A hook that leaves the gradient as it is."""


def wide_for(dtype: Any, wide: torch.dtype) -> torch.dtype | None:
    """What a narrower float, or a complex number of such, becomes; None for others."""
    if not isinstance(dtype, torch.dtype):  # a tensor would be compared by entries
        return None
    if dtype is torch.complex64 and wide is torch.float64:
        return torch.complex128
    return wide if dtype in NARROW and dtype.itemsize < wide.itemsize else None


BY_ROW = frozenset(
    "normal multinomial poisson binomial _standard_gamma _sample_dirichlet "
    "gumbel_softmax rrelu rrelu_".split()
)
WIDENED = frozenset(("to", "type", "type_as", "tensor", "as_tensor", "from_numpy"))


def _integers(full: Tensor, args: Any, kwargs: Any) -> Tensor:
    numbers = [value for value in args if isinstance(value, int)]
    high = kwargs.get("high", numbers[-1] if numbers else 1)
    low = kwargs.get("low", numbers[0] if len(numbers) > 1 else 0)
    return full.random_(int(low), int(high))


def _in_place(name: str) -> Callable[[Tensor, Any, Any], Tensor]:
    def draw(full: Tensor, args: Any, kwargs: Any) -> Tensor:
        return getattr(full, name)(*args[1:], **kwargs)

    return draw


IN_PLACE = "uniform_ normal_ exponential_ random_ log_normal_ cauchy_ geometric_"
DRAWS: dict[str, Callable[[Tensor, Any, Any], Tensor]] = {
    **dict.fromkeys(("rand", "rand_like"), lambda full, args, kwargs: full.uniform_()),
    **dict.fromkeys(("randn", "randn_like"), lambda full, args, kwargs: full.normal_()),
    **dict.fromkeys(("randint", "randint_like"), _integers),
    **{name: _in_place(name) for name in IN_PLACE.split()},
}
