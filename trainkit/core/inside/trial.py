"""Rows of a call that run to be looked at."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trainkit.core.inside.chunks import Chunk
from trainkit.core.inside.cut import Cut
from trainkit.core.inside.draws import States
from trainkit.core.inside.moment import (
    Moment,
    changed,
    put_back,
    settings_of,
    version_of,
)
from trainkit.core.inside.outputs import Unfit
from trainkit.core.inside.refusals import refusing
from trainkit.core.inside.rows import Arguments
from trainkit.core.nested import Field


class Trial:
    """Runs rows of one call, always with the same draws.

    Args:
        cut: which is called.
        arguments: of the call.
        moment: what the module is like.

    Attributes:
        begun: the random states that each run begins with.
        shadows: what stands for the parameters that train.
        has_graph: whether graphs are looked at too.
        evaluates: whether it runs in evaluation mode.
        has_drawn: whether the last run drew random numbers.
        eps: the coarsest rounding of what graphs have saved.
    """

    def __init__(self, cut: Cut, arguments: Arguments, moment: Moment) -> None:
        self.cut, self.arguments = cut, arguments
        self.begun = States(arguments.devices, of_host=True)
        self.shadows = cut.shadows(moment.parameters)
        self.has_graph = torch.is_grad_enabled()
        self.evaluates = self.has_drawn = False
        self.eps = 0.0

    def run(self, rows: Sequence[int]) -> list[Field]:
        """The outputs for some rows, without a graph."""
        arguments = self.arguments
        given = arguments.taken(rows, arguments.values)
        tensors = [each for each in given if isinstance(each, Tensor)]
        versions = list(map(version_of, tensors))
        with torch.no_grad(), self.again():
            fields = self.cut.fields(None, None, arguments, given)
        if versions != list(map(version_of, tensors)):
            raise Unfit("it changes its arguments in place")
        return fields

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Random states as they were, and evaluation mode if that is compared."""
        self.begun.put_back()
        modules = list(self.cut.module.modules()) if self.evaluates else []
        modes = [(each, each.training) for each in modules]
        for each, _ in modes:
            each.training = False
        try:
            yield
        finally:
            for each, mode in modes:
                each.training = mode
        now = States(self.arguments.devices, of_host=True)
        self.cut.draws_of_host |= self.begun.has_host_moved()
        self.has_drawn = not self.begun.are(now)

    def with_and_without(self, sample: Chunk) -> list[list[Any]]:
        """The outputs of a chunk with all columns, and with its own alone."""
        both: list[list[Any]] = []
        for chunk in (replace(sample, columns=None), sample):
            given = self.arguments.of(chunk, self.arguments.values)
            with torch.no_grad(), self.again():
                fields = self.cut.fields(None, None, self.arguments, given)
            both.append([each.value for each in fields])
        if self.has_drawn and not self.evaluates:
            self.evaluates = True  # other columns would have other draws
            return self.with_and_without(sample)
        return both

    def given(self, rows: Sequence[int]) -> tuple[list[Any], list[Tensor]]:
        """The values of some rows, and those of them that train."""
        given = self.arguments.taken(rows, self.arguments.values)
        for index, value in enumerate(self.arguments.values):
            if isinstance(value, Tensor) and value.requires_grad:
                given[index] = given[index].detach().requires_grad_()
        return given, [x for x in given if isinstance(x, Tensor) and x.requires_grad]


@contextlib.contextmanager
def looking(cut: Cut, arguments: Arguments, moment: Moment) -> Iterator[Trial]:
    """What runs rows of a call; behind it the module, and what draws, are as before.

    Args:
        cut: which is called.
        arguments: of the call.
        moment: what the module is like.
    """
    trial, before = Trial(cut, arguments, moment), moment.settings
    try:
        with refusing(cut.module, cut.name, arguments, moment):
            yield trial
        moment.check_state()
    finally:
        trial.begun.put_back()
        put_back(before, changed(before, settings_of(cut.module)))
        if torch.is_autocast_cache_enabled():
            torch.clear_autocast_cache()
