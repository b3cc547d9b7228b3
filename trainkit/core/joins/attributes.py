"""What is set in the attributes of modules, where micro-batches overwrite each
other's."""

from __future__ import annotations

import warnings
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from trainkit.core.batch_norm.layers import listed
from trainkit.core.inside.moment import version_of
from trainkit.core.inside.settings import OF_TORCH
from trainkit.errors import TrainkitError

Place = tuple[nn.Module, str]
Values = dict[Place, Any]

CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict)
SIMPLE = (bool, int, float, complex, str, bytes)
MISSING = object()

LOOKED_AT = 3
"""So many first calls of a module show which attributes its forward sets."""


class Attributes:
    """The attributes of a module and of those in it: each micro-batch has its own.

    A micro-batch begins with what they were before the call, as one batch does. What
    the last one has set stays. All attributes are looked at in the first calls; later
    those that were seen to change.

    Args:
        module: whose forward micro-batches run in turns.
        name: of it, for messages.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module, self._name = module, name
        self._known: dict[Place, None] = {}
        self._num_calls = 0
        self._before: Values = {}
        self._held: dict[int, Values] = {}
        self._now: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy begins anew, since modules are not copied as keys."""
        return {**vars(Attributes(self._module, self._name))}

    @property
    def _looks_at_all(self) -> bool:
        return self._num_calls < LOOKED_AT

    def begin(self) -> None:
        """Begin a call: no micro-batch has run."""
        self._before = _look(self._module, with_contents=self._looks_at_all)
        self._before.update(self._look())
        self._held, self._now = {}, None

    def switch(self, index: int) -> None:
        """Let another micro-batch run next."""
        if index == self._now:
            return
        current = self._look()
        if self._now is not None:
            self._held[self._now] = current
        wanted = self._held.pop(index, self._before)
        places = {**current, **wanted} if self._looks_at_all else self._known
        for place in list(places):
            value = wanted.get(place, MISSING)
            if not _is_same(current.get(place, MISSING), value):
                self._known[place] = None
                _put(place, value)
        self._now = index

    def undo(self) -> None:
        """Put back what was there before the call, which is to run once more."""
        now = _look(self._module, with_contents=True)
        for place in {**now, **self._before}:
            value = self._before.get(place, MISSING)
            if not _is_same(now.get(place, MISSING), value):
                _put(place, value)
        self._held, self._now = {}, None

    def end(self) -> None:
        """End a call whose forward has run; what it has set is known now."""
        now, before = _look(self._module, with_contents=False), self._before
        new = [
            place
            for place in {**before, **now}
            if place not in self._known
            and not _is_same(before.get(place, MISSING), now.get(place, MISSING))
        ]
        if new and self._held and not self._looks_at_all:
            warnings.warn(
                f"exact BatchNorm: {self._name} has set {_names(self._module, new)}, "
                f"which it had not set before. In this window micro-batches may have "
                f"read each other's value; from the next one on each has its own.",
                stacklevel=2,
            )
        self._known.update(dict.fromkeys(new))
        self._num_calls += bool(self._held)

    def _look(self) -> Values:
        if self._looks_at_all:
            return _look(self._module, with_contents=True)
        return {
            (module, name): _Contents.of(vars(module)[name])
            for module, name in self._known
            if name in vars(module)
        }


class SetBefore:
    """What a step sets before it calls a module, where the other steps run next.

    These would see it, and overwrite it. A number that counts is no harm, unless it is
    put back at the end.

    Args:
        module: whose attributes are looked at, and those of modules in it.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._at_start: Values = {}
        self._counted: dict[Place, None] = {}
        self._before: Values = {}

    def begin(self) -> None:
        """A window begins."""
        self._at_start, self._counted = self._look(), {}
        self._before = self._at_start

    def resume(self) -> None:
        """The first step resumes after a call."""
        self._before = self._look()

    def refuse(self, name: str) -> None:
        """Refuse what the first step has set on its way to a call.

        Args:
            name: of the module that is called.
        """
        now = self._look()
        new = [
            place
            for place, value in now.items()
            if not _is_same(self._before.get(place, MISSING), value)
            and not (isinstance(value, _Weights) and place not in self._before)
        ]
        counted = [place for place in new if type(now[place]) is int]
        self._counted.update(dict.fromkeys(counted))
        if others := [place for place in new if place not in self._counted]:
            self._refuse(others, f"before it calls {name}")

    def end(self) -> None:
        """Refuse numbers that the first step has put back at its end."""
        now = self._look()
        back = [p for p in self._counted if now.get(p) == self._at_start.get(p)]
        if back:
            self._refuse(back, "before a call, and puts it back behind it")

    def _refuse(self, places: Iterable[Place], when: str) -> None:
        raise TrainkitError(
            f"exact BatchNorm: a step sets {_names(self._module, places)} {when}. "
            f"There micro-batches wait for each other, so others would see it, or "
            f"overwrite it. Pass it to the module as an argument, set it after the "
            f"call, or cut inside the step, which then runs once: "
            f"MicroBatching(inside=...), or exact_batch_norm(..., size=...)."
        )

    def _look(self) -> Values:
        found: Values = {}
        for each in self._module.modules():
            if any(kind.__name__ == "Metric" for kind in type(each).__mro__):
                continue
            for name, value in vars(each).items():
                if name not in OF_TORCH:
                    found[each, name] = value
            for name, parameter in each._parameters.items():
                if parameter is not None:
                    trains = parameter.requires_grad
                    found[each, f"{name}.requires_grad"] = trains
                    if trains:
                        found[each, name] = _Weights(parameter)
        return found


def _names(module: nn.Module, places: Iterable[Place]) -> str:
    """The names of attributes, for messages."""
    paths = {each: path for path, each in module.named_modules()}
    return listed([f"{paths.get(m, '')}.{name}".lstrip(".") for m, name in places])


def _look(module: nn.Module, *, with_contents: bool) -> Values:
    return {
        (each, name): _Contents.of(value, is_kept=with_contents)
        for each in module.modules()
        for name, value in vars(each).items()
        if name not in OF_TORCH and name != "forward"
    }


class _Contents:
    """A list, dict or set, and what is in it; or only how much."""

    def __init__(self, value: Any, *, is_kept: bool) -> None:
        self.value, self.size = value, len(value)
        self.contents = value.copy() if is_kept else None

    @staticmethod
    def of(value: Any, *, is_kept: bool = True) -> Any:
        is_container = type(value) in CONTAINERS
        return _Contents(value, is_kept=is_kept) if is_container else value

    def is_same(self, other: _Contents) -> bool:
        if self.value is not other.value or self.size != other.size:
            return False
        if self.contents is None or other.contents is None:
            return True
        pairs = zip(_items(self.contents), _items(other.contents), strict=True)
        return all(_is_same(one, two) for one, two in pairs)

    def put_back(self) -> None:
        if self.contents is None:
            return
        self.value.clear()
        if isinstance(self.value, list | deque):
            self.value.extend(self.contents)
        else:
            self.value.update(self.contents)


class _Weights:
    """A parameter that trains, and where and how often it was written."""

    def __init__(self, parameter: Any) -> None:
        self.now = id(parameter), version_of(parameter), parameter.data_ptr()


def _items(contents: Any) -> Iterator[Any]:
    for key in contents:
        yield key
        if isinstance(contents, dict):
            yield contents[key]


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, _Contents) and isinstance(other, _Contents):
        return one.is_same(other)
    if isinstance(one, _Weights) and isinstance(other, _Weights):
        return one.now == other.now
    is_simple = type(one) is type(other) and isinstance(one, SIMPLE)
    return is_simple and one == other


def _put(place: Place, value: Any) -> None:
    module, name = place
    if value is MISSING:
        vars(module).pop(name, None)
    elif isinstance(value, _Contents):
        vars(module)[name] = value.value
        value.put_back()
    else:
        vars(module)[name] = value
