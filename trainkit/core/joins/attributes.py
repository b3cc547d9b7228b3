"""What is set in the attributes of modules, where micro-batches overwrite each
other's."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Generator, Tensor, nn

from trainkit.core.batch_norm.layers import listed
from trainkit.core.inside.moment import version_of
from trainkit.core.inside.settings import OF_TORCH
from trainkit.core.joins.sameness import Is
from trainkit.errors import TrainkitError

Place = tuple[Is, Any]
"""A dict, such as the attributes of a module, and a key in it."""

Values = dict[Place, Any]

LISTS = (list, set, deque)
SIMPLE = (bool, int, float, complex, str, bytes)
FUNCTIONS = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType)
MISSING = object()

LIBRARIES = frozenset(
    "builtins functools lightning lightning_fabric lightning_utilities numpy "
    "pytorch_lightning torch torchmetrics trainkit".split()
)
"""Objects of these are not looked into."""

LOOKED_AT = 3
"""So many first calls of a module show which attributes its forward sets."""

MOST = 1000
"""Longer lists and dicts are data, and what is in them is not looked at."""


class Attributes:
    """The attributes of a module and of those in it: each micro-batch has its own.

    A micro-batch begins with what they were before the call, as one batch does. What
    the last one has set stays. All attributes are looked at in the first calls; later
    those that were seen to change. So are dicts, lists and objects in them.

    Args:
        module: whose forward micro-batches run in turns.
        name: of it, for messages.

    Attributes:
        left: the names of those that the last call has changed.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module, self._name = module, name
        self._known: dict[Place, None] = {}
        self._num_calls = 0
        self._before: Values = {}
        self._held: dict[int, Values] = {}
        self._arrived: dict[int, Values] = {}
        self._now: int | None = None
        self.left: list[str] = []

    def __getstate__(self) -> dict[str, Any]:
        """A copy begins anew, since modules are not copied as keys."""
        return {**vars(Attributes(self._module, self._name))}

    @property
    def _looks_at_all(self) -> bool:
        return self._num_calls < LOOKED_AT

    def arrive(self, index: int) -> None:
        """Note what a micro-batch has as it comes to a call: an earlier one in its
        step may have set it."""
        self._arrived[index] = _look_at(self._known)

    def begin(self) -> None:
        """Begin a call: no micro-batch has run."""
        self._before = {**_look(self._module), **_look_at(self._known)}
        arrived, self._arrived = self._arrived, {}
        self._held = {n: {**self._before, **own} for n, own in arrived.items()}
        self._now = None

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
        now = _look(self._module)
        for place in {**now, **self._before}:
            value = self._before.get(place, MISSING)
            if not _is_same(now.get(place, MISSING), value):
                _put(place, value)
        self._held, self._now = {}, None

    def end(self) -> None:
        """End a call whose forward has run; what it has set is known now."""
        now, before = _look(self._module), self._before
        several = self._now not in (None, 0)
        new = [
            place
            for place in {**before, **now}
            if not _is_same(before.get(place, MISSING), now.get(place, MISSING))
        ]
        if several:
            self._refuse_written(before, now)
        unknown = [place for place in new if place not in self._known]
        if unknown and several and not self._looks_at_all:
            warnings.warn(
                f"exact BatchNorm: {self._name} has set "
                f"{_names(self._module, unknown)}, which it had not set before. In "
                f"this window micro-batches may have read each other's value; from "
                f"the next one on each has its own.",
                stacklevel=2,
            )
        self._known.update(dict.fromkeys(unknown))
        if self._now is not None:
            self._held[self._now] = _look_at(self._known)
        for index, own in self._held.items():
            self._held[index] = {p: own.get(p, MISSING) for p in self._known}
        self._num_calls += several
        self._before = {}
        self.left = [_names(self._module, [place]) for place in new]

    def resume(self, index: int) -> None:
        """Put back what the call has set for a micro-batch, whose step resumes."""
        for place, value in self._held.pop(index, {}).items():
            _put(place, value)

    def forget(self) -> None:
        """Hold nothing for micro-batches any more."""
        self._held = {}

    def _look(self) -> Values:
        return _look(self._module) if self._looks_at_all else _look_at(self._known)

    def _refuse_written(self, before: Values, now: Values) -> None:
        """Refuse tensors that were changed in place: once for each micro-batch, and in
        segments once more."""
        written = [
            place
            for place, value in now.items()
            if isinstance(value, _Written) and value.is_changed(before.get(place))
        ]
        if written:
            raise TrainkitError(
                f"exact BatchNorm: the forward of {self._name} changes "
                f"{_names(self._module, written)} in place, which each micro-batch "
                f"would do once more. Return what is to be added, and add it in the "
                f"step."
            )


class OwnInSteps:
    """What steps set before they call a module, where the other steps run next.

    Each step finds its own again when it resumes.

    Args:
        module: whose attributes are looked at, and those of modules in it.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._known: dict[Place, None] = {}
        self._own: dict[int, Values] = {}
        self._before: Values = {}

    def __getstate__(self) -> dict[str, Any]:
        """A copy begins anew, since modules are not copied as keys."""
        return {**vars(OwnInSteps(self._module))}

    def begin(self) -> None:
        """A window begins."""
        self._own, self._before = {}, {}

    def resume(self, index: int) -> None:
        """A step begins, or resumes after a call."""
        for place, value in self._own.pop(index, {}).items():
            _put(place, value)

    def look(self) -> None:
        """Look at what is there before a step sets anything."""
        self._before = self._look()

    def arrive(self, index: int, name: str) -> None:
        """A step has come to a call.

        Args:
            index: of the micro-batch.
            name: of the module that is called.
        """
        now, before = self._look(), self._before
        new = [
            place
            for place in {**before, **now}
            if not _is_same(before.get(place, MISSING), now.get(place, MISSING))
        ]
        kinds = {p: (type(before.get(p)), type(now.get(p))) for p in new}
        weights = [place for place in new if _Weights in kinds[place]]
        if moved := [p for p in weights if p in before and p in now]:
            self._refuse(moved, name)
        for place in new:
            if place not in self._known and place not in weights:
                self._known[place] = None
                for own in self._own.values():  # what earlier ones have left there
                    own[place] = before.get(place, MISSING)
        self._own[index] = {p: now.get(p, MISSING) for p in self._known}

    def refuse_unlike(self, module: nn.Module, name: str) -> None:
        """Refuse what has not the same value in all steps, if the module that they
        call may read it, or it is on or off, so that steps may have turned it over.

        Args:
            module: which is called.
            name: of it.
        """
        inside = {id(each) for _, each in _dicts(module)}
        first = self._own.get(0, {})
        for place in self._known:
            value = first.get(place, MISSING)
            may_read = id(place[0].held) in inside or isinstance(value, bool)
            others = (own.get(place, MISSING) for own in self._own.values())
            if may_read and not all(_is_same(value, other) for other in others):
                self._refuse([place], name)

    def _refuse(self, places: Iterable[Place], name: str) -> None:
        raise TrainkitError(
            f"exact BatchNorm: a step sets {_names(self._module, places)} before it "
            f"calls {name}, where micro-batches wait for each other, so that the call "
            f"would read another's. Pass it to the module as an argument, set it "
            f"after the call, or cut inside the step, which then runs once: "
            f"MicroBatching(inside=...), or exact_batch_norm(..., size=...)."
        )

    def _look(self) -> Values:
        found = _look(self._module)
        for parameter in self._module.parameters():
            own = Is(parameter)
            found[own, "requires_grad"] = parameter.requires_grad
            if parameter.requires_grad:
                found[own, "data"] = _Weights(parameter)
        return found


# ---- places --------------------------------------------------------------------------


def _dicts(module: nn.Module) -> Iterator[tuple[str, dict[Any, Any]]]:
    """The attributes of a module, of those in it, and of objects there; and dicts.
    Metrics are left out, which add up whatever they get."""
    for path, each in module.named_modules():
        if any(kind.__name__ == "Metric" for kind in type(each).__mro__):
            continue
        yield path, vars(each)
        for name, value in list(vars(each).items()):
            if name not in OF_TORCH:
                yield from _dicts_in(f"{path}.{name}".lstrip("."), value, depth=2)


def _dicts_in(path: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    inner = value if isinstance(value, dict) else _attributes_of(value)
    if inner is None or len(inner) > MOST:
        return
    yield path, inner
    if depth > 1:
        for name, each in list(inner.items()):
            yield from _dicts_in(f"{path}.{name}", each, depth - 1)


def _attributes_of(value: Any) -> dict[str, Any] | None:
    """The attributes of an object of the user's own."""
    other = (*FUNCTIONS, *LISTS, *SIMPLE, nn.Module, Tensor, Generator)
    if value is None or isinstance(value, other):
        return None
    if type(value).__module__.partition(".")[0] in LIBRARIES:
        return None
    return getattr(value, "__dict__", None)


def _look(module: nn.Module) -> Values:
    return {
        (own, key): _held(value)
        for _, each in _dicts(module)
        for own in [Is(each)]
        for key, value in each.items()
        if not (isinstance(key, str) and (key in OF_TORCH or key == "forward"))
        and not _is_computed(each, key)
    }


def _is_computed(attributes: dict[Any, Any], name: Any) -> bool:
    """Whether it is a weight that pruning or weight_norm computes before each use."""
    own = attributes.get("_parameters")
    names = own if isinstance(own, dict) else ()
    ends = (f"{name}_orig", f"{name}_g", f"{name}_v")
    return any(each in names for each in ends)


def _look_at(places: Iterable[Place]) -> Values:
    return {
        place: _held(place[0].held[place[1]])
        for place in places
        if place[1] in place[0].held
    }


def _put(place: Place, value: Any) -> None:
    holder, key = place[0].held, place[1]
    if isinstance(holder, nn.Parameter):
        holder.requires_grad_(value)
    elif value is MISSING:
        holder.pop(key, None)
    elif isinstance(value, _Contents):
        holder[key] = value.value
        value.put_back()
    else:
        holder[key] = value.value if isinstance(value, _Written) else value


def _names(module: nn.Module, places: Iterable[Place]) -> str:
    """The names of attributes, for messages."""
    paths = {id(each): path for path, each in _dicts(module)}
    named = {id(each): path for path, each in module.named_parameters()}
    found = []
    for own, key in places:
        path = named.get(id(own.held), "") or paths.get(id(own.held), "")
        found.append(path if key == "data" else f"{path}.{key}".lstrip("."))
    return listed(found)


# ---- values --------------------------------------------------------------------------


def _held(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _Written(value)
    return _Contents(value) if isinstance(value, LISTS) else value


class _Written:
    """A tensor, and how often it was changed in place."""

    def __init__(self, value: Tensor) -> None:
        self.value, self.version = value, version_of(value)

    def is_changed(self, before: Any) -> bool:
        return (
            isinstance(before, _Written)
            and self.value is before.value
            and self.version != before.version
        )


class _Weights:
    """A parameter that trains, and where and how often it was written."""

    def __init__(self, parameter: Any) -> None:
        self.now = id(parameter), version_of(parameter), parameter.data_ptr()


class _Contents:
    """A list or set, and what is in it, also in lists there."""

    def __init__(self, value: Any) -> None:
        self.value, self.size = value, len(value)
        self.contents: list[Any] | None = None
        if self.size <= MOST:
            self.contents = [_held(each) for each in value]

    def is_same(self, other: _Contents) -> bool:
        if self.value is not other.value or self.size != other.size:
            return False
        if self.contents is None or other.contents is None:
            return True
        pairs = zip(self.contents, other.contents, strict=True)
        return all(_is_same(one, two) for one, two in pairs)

    def put_back(self) -> None:
        if self.contents is None:
            return
        inner = [each for each in self.contents if isinstance(each, _Contents)]
        for each in inner:
            each.put_back()
        wrapped = (_Contents, _Written)
        held = [x.value if isinstance(x, wrapped) else x for x in self.contents]
        self.value.clear()
        fill = self.value.update if isinstance(self.value, set) else self.value.extend
        fill(held)


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, _Contents):
        return one.is_same(other)
    if isinstance(one, _Weights):
        return one.now == other.now
    if isinstance(one, _Written):
        return one.value is other.value
    return isinstance(one, SIMPLE) and one == other
