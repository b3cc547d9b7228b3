"""Python's and NumPy's random numbers, replayed by row within a pass."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import BuiltinMethodType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from numpy.random import bit_generator
from torch import nn

from trainkit.core.bare import is_a, names_in
from trainkit.core.generators import generator_keeper
from trainkit.errors import TrainkitError
from trainkit.lit.measure.draws import Draws, seed_of
from trainkit.lit.measure.own_code import owners_of
from trainkit.lit.measure.place import place
from trainkit.lit.rerun.hidden import is_of_framework
from trainkit.lit.rerun.snapshot import holds_plain_values, is_iterator

PYTHONS, NUMPYS, MAKER = random.Random, np.random.RandomState, np.random.default_rng
KINDS = (PYTHONS, NUMPYS, np.random.Generator)
METHODS = (MethodType, BuiltinMethodType)
PACKAGE = str(Path(__file__).parents[2])
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
PYTHONS_ALL = PYTHONS_OWN | MIXING


@contextlib.contextmanager
def replayed(module: nn.Module, draws: Draws) -> Iterator[Callable[[], None]]:
    """Let the generators that a module can reach draw by row while a pass runs.

    These are the functions of `random` and `numpy.random`, and generators that modules
    or the files of their classes hold. It yields what puts those generators back to
    where they are now. A generator that a pass makes is noted, and not replayed.
    """
    owners: dict[int, Any] = {}
    own: dict[int, tuple[Any, Any]] = {}  # what stands in, and what for
    imported = set(sys.modules)
    with contextlib.ExitStack() as stack:
        for held in _namespaces(module):
            others: dict[str, Any] = {
                name: Unmoved(name, value)
                for name, value in held.items()
                if is_iterator(value) and not holds_plain_values(value)
            }
            for name, value in list(held.items()):
                owner = value.__self__ if is_a(value, *METHODS) else value
                if name == "_inst" or not is_a(owner, *KINDS):
                    continue
                if owner is not value:
                    others[name] = _method(owner, value.__name__, value, draws)
                elif not is_a(owner, PYTHONS):
                    others[name] = _replaying(owner, draws)
                elif id(owner) not in owners:
                    found = ((n, getattr(owner, n, None)) for n in PYTHONS_ALL)
                    own_methods = {
                        n: _method(owner, n, m, draws) for n, m in found if m
                    }
                    _put(stack, vars(owner), own_methods)
                owners[id(owner)] = owner
            own |= {id(others[name]): (others[name], held[name]) for name in others}
            _put(stack, held, others)
        keepers: list[Any] = [generator_keeper(owner) for owner in owners.values()]

        def put_back() -> None:
            for each in keepers:
                each()

        stack.enter_context(_noted_makers(draws))
        try:
            yield put_back
        finally:
            for name in sys.modules.keys() - imported:  # `from random import gauss`
                held = names_in(sys.modules[name]) or {}
                held.update({n: own[id(v)][1] for n, v in held.items() if id(v) in own})


class Unmoved:
    """Stands in for an iterator, and gives nothing.

    Args:
        name: of the iterator.
        own: the iterator.
    """

    def __init__(self, name: str, own: Any) -> None:
        self._name, self._own = name, own

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        raise TrainkitError(
            f"training_step: it takes from {self._name}, an iterator, which cannot be "
            f"put back after a pass of a few rows. Count in an attribute instead."
        )


def _put(
    stack: contextlib.ExitStack, held: dict[str, Any], others: dict[str, Any]
) -> None:
    """Other values in a namespace, until the end of the stack."""
    for name, other in others.items():
        if name in held:
            stack.callback(held.__setitem__, name, held[name])
        else:
            stack.callback(held.pop, name, None)
        held[name] = other


@contextlib.contextmanager
def _noted_makers(draws: Draws) -> Iterator[None]:
    """Note the lines that make generators, by what every maker calls: nothing that a
    file could import is replaced."""
    initialise, kind = PYTHONS.__init__, bit_generator.ISeedSequence

    def note() -> None:
        if draws.is_active and PACKAGE not in sys._getframe(2).f_code.co_filename:
            draws.unlike.add(f"a generator made at {place()}")

    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        note()
        initialise(self, *args, **kwargs)

    class Kind:
        def __instancecheck__(self, value: Any) -> bool:
            note()
            return isinstance(value, kind)

    PYTHONS.__init__, bit_generator.ISeedSequence = noted, Kind()
    try:
        yield
    finally:
        PYTHONS.__init__, bit_generator.ISeedSequence = initialise, kind


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
    objects = [
        value
        for each in module.modules()
        for value in vars(each).values()
        if not is_a(value, nn.Module, type, ModuleType, FunctionType)
        and not is_of_framework(type(value).__module__)
    ]
    owners = [random, np.random, *owners_of(module), *module.modules(), *objects]
    return [held for held in map(names_in, owners) if type(held) is dict]


def _replaying(own: Any, draws: Draws) -> Any:
    """A generator of the same kind on the same bits, whose draws are replayed by row
    while a pass runs. What a pass keeps of it therefore draws as its own does."""
    kind: Any = type(own)

    class Replaying(kind):
        def __getattribute__(self, name: str) -> Any:
            return _method(self, name, super().__getattribute__(name), draws)

    bits = own._bit_generator if is_a(own, NUMPYS) else own.bit_generator
    made: Any = kind.__new__(Replaying, bits)
    kind.__init__(made, bits)
    return made


def _method(
    owner: Any, name: str, own: Callable[..., Any], draws: Draws
) -> Callable[..., Any]:
    is_python = is_a(owner, PYTHONS)
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
    if is_a(owner, PYTHONS):
        return PYTHONS(seed)
    return NUMPYS(seed) if is_a(owner, NUMPYS) else MAKER(seed)
