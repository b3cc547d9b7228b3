"""Python's and NumPy's random numbers, replayed by row within a pass."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterable, Iterator
from types import BuiltinMethodType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from trainkit.core.generators import generator_keeper
from trainkit.lit.measure.draws import Draws, seed_of
from trainkit.lit.measure.own_code import files_of, is_of_framework
from trainkit.lit.measure.place import place

PYTHONS, NUMPYS, MAKER = random.Random, np.random.RandomState, np.random.default_rng
KINDS = (PYTHONS, NUMPYS, np.random.Generator)
MIXING = frozenset("shuffle permutation permuted sample choices".split())
"""They draw among entries, whose number is that of the batch as a rule."""

SIZE_AT: dict[str, int] = dict.fromkeys(
    ("random", "random_sample", "standard_normal"), 0
)
SIZE_AT |= dict.fromkeys(("exponential", "poisson", "choice", "geometric"), 1)
SIZE_AT |= dict.fromkeys(("standard_gamma", "standard_exponential", "chisquare"), 1)
SIZE_AT |= dict.fromkeys(("uniform", "normal", "beta", "gamma", "binomial"), 2)
SIZE_AT |= dict.fromkeys(("laplace", "lognormal", "gumbel", "randint", "integers"), 2)
"""Where the positional argument `size` stands in NumPy's draws."""

BY_SHAPE = frozenset(("rand", "randn"))
PYTHONS_OWN = frozenset(
    "random uniform gauss normalvariate randint randrange betavariate choice triangular"
    " expovariate gammavariate lognormvariate paretovariate vonmisesvariate getrandbits"
    " weibullvariate".split()
)


@contextlib.contextmanager
def replayed(module: nn.Module, draws: Draws) -> Iterator[Callable[[], None]]:
    """Let the generators that a module can reach draw by row while a pass runs.

    These are the functions of `random` and `numpy.random`, and generators that modules
    or the files of their classes hold. It yields what puts those generators back to
    where they are now.
    """
    put_back, owners = [], {}
    for held in _namespaces(module):
        for name, value in list(held.items()):
            other = None if name == "_inst" else _replaced(value, draws)
            if other is not None:
                held[name] = other
                put_back.append((held, name, value))
                owner = getattr(value, "__self__", value)
                owners[id(owner)] = owner
    keepers = [generator_keeper(owner) for owner in owners.values()]
    try:
        yield lambda: _call(keepers)
    finally:
        for held, name, value in put_back:
            held[name] = value


def _call(functions: Iterable[Callable[[], None] | None]) -> None:
    for function in functions:
        if function is not None:
            function()


def drawn_unseen(before: dict[str, Any]) -> list[str]:
    """The global generators that are no longer where they were: a pass has drawn from
    them by a function that is not replayed."""
    return [
        f"{name}'s generator"
        for name, state in global_states().items()
        if state != before[name]
    ]


def global_states() -> dict[str, Any]:
    """Where the global generators of Python and NumPy are."""
    numpys: Any = np.random.get_state(legacy=False)
    own = numpys["state"]
    return {
        "Python": random.getstate(),
        "NumPy": (own["pos"], own["key"].tobytes(), numpys["has_gauss"]),
    }


def _namespaces(module: nn.Module) -> list[dict[str, Any]]:
    modules = [random, np.random, *files_of(module)]
    objects = [
        value
        for each in module.modules()
        for value in vars(each).values()
        if type(getattr(value, "__dict__", None)) is dict
        and not isinstance(value, nn.Module | type | ModuleType | FunctionType)
        and not is_of_framework(type(value).__module__)
    ]
    return [vars(each) for each in (*modules, *module.modules(), *objects)]


def _replaced(value: Any, draws: Draws) -> Any:
    """What stands in for a generator, for one of its methods, or for what makes one;
    None for other things."""
    if isinstance(value, KINDS):
        return Replayed(value, draws)
    if value is MAKER:
        return lambda *args: Replayed(MAKER(*args), draws)
    if value is PYTHONS or value is NUMPYS:
        return _replaying(value, draws)
    if isinstance(value, MethodType | BuiltinMethodType):
        owner = value.__self__
        if isinstance(owner, KINDS):
            return _method(owner, value.__name__, value, draws)
    return None


class Replayed:
    """A generator whose draws are replayed by row while a pass runs."""

    __slots__ = ("_draws", "_own")  # a snapshot of its attributes would undo the replay

    def __init__(self, own: Any, draws: Draws) -> None:
        self._own, self._draws = own, draws

    def __deepcopy__(self, memo: Any) -> Replayed:
        return Replayed(copy.deepcopy(self._own, memo), self._draws)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._own.__reduce_ex__(protocol)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._own, name)
        if not callable(value):
            return value
        return _method(self._own, name, value, self._draws)


def _replaying(kind: Any, draws: Draws) -> type:
    """A class that stands in for a class of generators, and makes replayed ones."""

    class Replaying(type):
        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, kind)

        def __call__(cls, *args: Any, **kwargs: Any) -> Replayed:
            return Replayed(kind(*args, **kwargs), draws)

    return Replaying(kind.__name__, (kind,), {})


def _method(
    owner: Any, name: str, own: Callable[..., Any], draws: Draws
) -> Callable[..., Any]:
    is_python = isinstance(owner, PYTHONS)
    is_known = name in PYTHONS_OWN if is_python else name in (*SIZE_AT, *BY_SHAPE)
    if not is_known and name not in MIXING:
        return own

    def call(*args: Any, **kwargs: Any) -> Any:
        if not draws.is_active:
            return own(*args, **kwargs)
        line = f"{name} at {place()}"
        if name in MIXING:
            return _mixed(line, name, owner, args, kwargs, draws)
        if is_python:
            key = draws.scalar(line, _options(args, kwargs))
            return getattr(PYTHONS(seed_of(key)), name)(*args, **kwargs)
        return _sized(line, name, owner, args, dict(kwargs), draws)

    return call


def _mixed(
    line: str, name: str, owner: Any, args: Any, kwargs: Any, draws: Draws
) -> Any:
    draws.unlike.add(line)
    if draws.identity and name == "shuffle":
        return None
    if draws.identity and name in ("permutation", "permuted"):
        given = args[0]
        return np.arange(given) if isinstance(given, int) else np.array(given)
    return getattr(_seeded(owner, seed_of(draws.key(line))), name)(*args, **kwargs)


def _sized(
    line: str, name: str, owner: Any, args: Any, kwargs: Any, draws: Draws
) -> Any:
    """A draw of NumPy's, for all rows where its size is known."""
    if name in BY_SHAPE:
        size, args = args, ()
    else:
        at = SIZE_AT[name]
        size = kwargs.pop("size", args[at] if len(args) > at else None)
        args = args[:at] + args[at + 1 :]
    among = None
    if name == "choice":
        among, args = args[0], args[1:]
        args = (among if isinstance(among, int) else len(among), *args)
    shape = () if size is None else tuple(np.atleast_1d(size).tolist())
    for_arrays = name != "choice" and any(np.ndim(each) for each in args)
    if for_arrays or kwargs.get("replace") is False:
        draws.unlike.add(line)

    def make(full: list[int], seed: int) -> torch.Tensor:
        method = getattr(_seeded(owner, seed), name)
        if name in BY_SHAPE:
            return torch.as_tensor(np.asarray(method(*full)))
        sized = {"size": tuple(full)} if full else {}
        return torch.as_tensor(np.asarray(method(*args, **sized, **kwargs)))

    if line in draws.unlike:
        found = make(list(shape), seed_of(draws.key(line))).numpy()
    else:
        found = draws.draw(line, shape, make, _options(args, kwargs)).numpy()
    if among is not None and not isinstance(among, int):
        found = np.asarray(among)[found]
    return found if found.ndim else found.item()


def _options(args: Any, kwargs: Any) -> tuple[Any, ...]:
    """The numbers that a draw is given, and how many entries there are to choose."""
    given = (*args, *kwargs.values())
    numbers = [each for each in given if isinstance(each, int | float)]
    return (*numbers, *(len(each) for each in given if isinstance(each, list | tuple)))


def _seeded(owner: Any, seed: int) -> Any:
    """A generator of the owner's kind that begins at a seed."""
    if isinstance(owner, PYTHONS):
        return PYTHONS(seed)
    return NUMPYS(seed) if isinstance(owner, NUMPYS) else MAKER(seed)
