"""What is set in the attributes of modules, where micro-batches overwrite each
other's."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from torch import nn

from trainkit.core.batch_norm.layers import listed
from trainkit.core.joins.places import (
    MISSING,
    Place,
    Values,
    Weights,
    changed,
    is_same,
    look,
    look_at,
    names_of,
    paths_of,
    put,
    written,
)
from trainkit.core.joins.sameness import Is
from trainkit.errors import TrainkitError

LOOKED_AT = 3
"""So many first calls of a module show which attributes its forward sets."""


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
        self._arrived[index] = look_at(self._known)

    def begin(self) -> None:
        """Begin a call: no micro-batch has run."""
        self._before = {**look(self._module), **look_at(self._known)}
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
        if self._looks_at_all:
            self._known.update(dict.fromkeys(changed(wanted, current)))
        for place in self._known:
            value = wanted.get(place, MISSING)
            if not is_same(current.get(place, MISSING), value):
                put(place, value)
        self._now = index

    def undo(self) -> None:
        """Put back what was there before the call, which is to run once more."""
        for place in changed(self._before, look(self._module)):
            put(place, self._before.get(place, MISSING))
        self._held, self._now = {}, None

    def end(self) -> None:
        """End a call whose forward has run; what it has set is known now."""
        now, before = look(self._module), self._before
        several = self._now not in (None, 0)
        new = changed(before, now)
        if several:
            self._refuse_written(before, now)
        unknown = [place for place in new if place not in self._known]
        if unknown and several and not self._looks_at_all:
            warnings.warn(
                f"exact BatchNorm: {self._name} has set "
                f"{listed(names_of(self._module, unknown))}, which it had not set "
                f"before. In "
                f"this window micro-batches may have read each other's value; from "
                f"the next one on each has its own.",
                stacklevel=2,
            )
        self._known.update(dict.fromkeys(unknown))
        if self._now is not None:
            self._held[self._now] = look_at(self._known)
        for index, own in self._held.items():
            self._held[index] = {p: own.get(p, MISSING) for p in self._known}
        self._num_calls += several
        self._before = {}
        self.left = names_of(self._module, new)

    def resume(self, index: int) -> None:
        """Put back what the call has set for a micro-batch, whose step resumes."""
        for place, value in self._held.pop(index, {}).items():
            put(place, value)

    def forget(self) -> None:
        """Hold nothing for micro-batches any more."""
        self._held = {}

    def _look(self) -> Values:
        return look(self._module) if self._looks_at_all else look_at(self._known)

    def _refuse_written(self, before: Values, now: Values) -> None:
        """Refuse tensors that were changed in place: once for each micro-batch, and in
        segments once more."""
        if places := written(before, now):
            raise TrainkitError(
                f"exact BatchNorm: the forward of {self._name} changes "
                f"{listed(names_of(self._module, places))} in place, which each "
                f"micro-batch would do once more. Return what is to be added, and add "
                f"it in the step."
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
        self._num_windows = 0

    def __getstate__(self) -> dict[str, Any]:
        """A copy begins anew, since modules are not copied as keys."""
        return {**vars(OwnInSteps(self._module))}

    def begin(self) -> None:
        """A window begins."""
        self._num_windows += 1

    def end(self) -> None:
        """A window has ended; nothing is held."""
        self._own, self._before = {}, {}

    def resume(self, index: int) -> None:
        """A step begins, or resumes after a call."""
        for place, value in self._own.pop(index, {}).items():
            put(place, value)

    def look(self, index: int) -> None:
        """Look at what is there before a step sets anything."""
        self._before = self._look(index)

    def arrive(self, index: int, name: str) -> None:
        """A step has come to a call.

        Args:
            index: of the micro-batch.
            name: of the module that is called.
        """
        now, before = self._look(index), self._before
        new = changed(before, now)
        kinds = {p: (type(before.get(p)), type(now.get(p))) for p in new}
        weights = [place for place in new if Weights in kinds[place]]
        moved = [place for place in weights if place in before and place in now]
        if moved or (moved := written(before, now)):
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
        inside = paths_of(module) if self._known else {}
        first = self._own.get(0, {})
        for place in self._known:
            value = first.get(place, MISSING)
            may_read = id(place[0].held) in inside or isinstance(value, bool)
            others = (own.get(place, MISSING) for own in self._own.values())
            if may_read and not all(is_same(value, other) for other in others):
                self._refuse([place], name)

    def _refuse(self, places: Iterable[Place], name: str) -> None:
        raise TrainkitError(
            f"exact BatchNorm: a step sets {listed(names_of(self._module, places))} "
            f"before it calls {name}, where micro-batches wait for each other, so that "
            f"the call would read another's. Pass it to the module as an argument, set "
            f"it after the call, or cut inside the step, which then runs once: "
            f"MicroBatching(inside=...), or exact_batch_norm(..., size=...)."
        )

    def _look(self, index: int) -> Values:
        """All attributes, in the first windows and for the first step of each; those
        that were seen to change for the others."""
        if index and self._num_windows > LOOKED_AT:
            return look_at(self._known)
        found = look(self._module)
        for parameter in self._module.parameters():
            own = Is(parameter)
            found[own, "requires_grad"] = parameter.requires_grad
            if parameter.requires_grad:
                found[own, "data"] = Weights(parameter)
        return found
