"""The choice between one graph and segments, for the calls of one module."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from trainkit.core.batch_norm.layers import listed
from trainkit.core.inside.checks import (
    Strangers,
    leaves_of,
    refuse_strangers,
    strangers,
)
from trainkit.core.inside.draws import Draws
from trainkit.core.inside.moment import Moment
from trainkit.core.inside.rows import are_equal
from trainkit.core.inside.settings import settings_of
from trainkit.core.joins.attributes import Attributes
from trainkit.core.joins.device import DevicePass
from trainkit.core.joins.flat import FlatPass
from trainkit.core.joins.host import transport_to
from trainkit.core.joins.layers import (
    Sharing,
    devices_of,
    other_norms,
    places_of,
    refuse_other_layers,
    running_statistics,
    versions_of,
)
from trainkit.core.joins.left import Left
from trainkit.core.joins.net import (
    Around,
    Gradients,
    Net,
    Pass,
    layers_of,
    nothing_around,
)
from trainkit.core.joins.program import Program, Untraceable
from trainkit.core.joins.tracing import autocast_now, looks_of, traced
from trainkit.core.joins.transport import Transport
from trainkit.core.out_of_memory import is_out_of_memory, release
from trainkit.core.split.fields import Build
from trainkit.errors import TrainkitError

Memory = Literal["auto", "device", "flat"]

MOST_PROGRAMS = 16
"""So many kinds of calls of a module are remembered."""


def check_memory(memory: Any) -> None:
    """Refuse a word that says nothing about memory."""
    if memory not in get_args(Memory):
        raise TrainkitError(
            f"exact BatchNorm memory: must be one of {list(get_args(Memory))}, "
            f"received {memory!r}."
        )


class Engine:
    """Runs calls of a module by all micro-batches of a window.

    Args:
        module: which is called.
        name: of it, for messages.
        memory: `"device"`: one graph of all micro-batches. `"flat"`: segments between
            the layers, which run once more in the backward pass. `"auto"`: one graph,
            until memory runs out; segments where ranks share statistics, since these
            cannot be tried again on one rank alone.
        sharing: which ranks share statistics.

    Attributes:
        is_flat: whether the last call ran in segments.
        prefers_flat: whether the next one is to.
        why_not: why the module does not run in segments, if it was tried.
    """

    def __init__(
        self, module: nn.Module, name: str, memory: Memory, sharing: Sharing
    ) -> None:
        check_memory(memory)
        self.module, self.name = module, name
        self.why_not = ""
        self.is_flat = False
        self.sharing = sharing
        self._memory: Memory = memory
        self.prefers_flat = memory == "flat"
        self._programs: dict[Any, Program | str] = {}
        self._draws = Draws()
        self.attributes = Attributes(module, name)
        self._strangers = Strangers(name)
        self._is_first, self._has_said = True, False

    def __getstate__(self) -> dict[str, Any]:
        """A copy begins anew: programs are another module's."""
        anew = {"_programs": {}, "_draws": Draws(), "_is_first": True}
        return {**vars(self), **anew, "_strangers": Strangers(self.name)}

    def begin(
        self,
        run: Callable[[list[Any]], Any],
        arguments: Sequence[list[Any]],
        moment: Moment | None = None,
        *,
        around: Around = nothing_around,
        switched: Callable[[int], None] = lambda index: None,
        in_one_graph: bool = False,
    ) -> Pass:
        """Run a call of all micro-batches forward.

        Args:
            run: the module's own forward, on a list of arguments.
            arguments: of each micro-batch.
            moment: what the module is like; default: it is looked at.
            around: a context for the forward of each micro-batch.
            switched: is called with the number of the micro-batch that runs next.
            in_one_graph: run in one graph in any case.
        """
        devices = devices_of(value for each in arguments for value in each)
        refuse_other_layers(self.module, self.name)
        _refuse_sharded(self.module, self.name)
        transport = self._transport(arguments)
        layers = layers_of(self.module, self.name)

        def turn(index: int) -> None:
            switched(index)
            self.attributes.switch(index)

        net = Net(
            self.module,
            self.name,
            run,
            layers,
            self.sharing,
            transport,
            around,
            turn,
        )
        if self._memory == "auto" and self.sharing.ranks.size > 1:
            self.prefers_flat = True
        moment = moment or Moment(self.module, self.name, devices)
        others = other_norms(self.module, self.name)
        # A later call moves them.
        moment.leave_out(running_statistics(self.module, {**layers, **others}))
        if others and self._is_first:
            names = listed(list(others.values()))
            warnings.warn(
                f"exact BatchNorm: {names} moves running statistics with each "
                f"micro-batch, which one batch does once. The gradient is right; what "
                f"is kept for evaluation is not the big batch's. Use "
                f"track_running_stats=False.",
                stacklevel=2,
            )
        found = _Chosen(self, net, moment, self._draws, arguments)
        left = Left(self.module) if self._is_first else None
        written, places = versions_of(arguments), places_of(self.module)
        self.attributes.begin()
        with _Watch(self.name) if self._is_first else nullcontext():
            found.forward(in_one_graph=in_one_graph)
        self.attributes.end()
        if versions_of(arguments) != written:
            raise TrainkitError(
                f"{self.name}: its forward pass must not change its arguments in "
                f"place, since others may need them. Give it a clone()."
            )
        moment.check_state()
        now = places_of(self.module)
        if moved := [name for name in places if now.get(name) != places[name]]:
            raise TrainkitError(
                f"{self.name}: its forward pass must not exchange the data of weights, "
                f"which micro-batches that run in turns would put back for each other, "
                f"and it exchanged {listed(moved)}. Compute other weights, and pass "
                f"them on."
            )
        if left is not None and (names := left.since(with_graph=True)):
            raise TrainkitError(
                f"{self.name}: its forward leaves tensors with a gradient in "
                f"{listed(names)}, where each micro-batch overwrites those of the one "
                f"before. Return them as outputs, or detach() them."
            )
        self._is_first = False
        if self.why_not and not self._has_said and self.sharing.ranks.index == 0:
            self._has_said = True
            warnings.warn(
                f"exact BatchNorm: {self.name} cannot run in segments, so all "
                f"micro-batches run in one graph, whose memory grows with the window "
                f"({self.why_not}).",
                stacklevel=2,
            )
        return found

    def _transport(self, arguments: Sequence[list[Any]]) -> Transport:
        """What keeps the tensors of a call, but for those that are there anyway."""
        given = [x for each in arguments for x in each if isinstance(x, Tensor)]
        stays = [*given, *self.module.parameters(), *self.module.buffers()]
        on_cuda = (x.device for x in stays if x.is_cuda)
        return transport_to(next(on_cuda, torch.device("cpu")), stays)

    def program(self, net: Net, arguments: Sequence[list[Any]]) -> Program | None:
        """The module's forward in segments; None if it cannot be split."""
        key = self._key(arguments[0])
        if key not in self._programs:
            if len(self._programs) >= MOST_PROGRAMS:
                self._programs.clear()
            try:
                _refuse_unlike(arguments)
                self._programs[key] = traced(net, arguments[0])
            except Untraceable as error:
                self._programs[key] = str(error)
        found = self._programs[key]
        if isinstance(found, str):
            self.why_not = found
            return None
        return found

    def look_for_strangers(
        self, outputs: list[Tensor], arguments: list[Tensor]
    ) -> None:
        """Refuse what trains, and is neither a parameter nor an argument, in the first
        calls.

        Args:
            outputs: of one graph of all micro-batches.
            arguments: from which it begins.
        """
        if self._strangers.has_looked:
            return
        known = [*arguments, *self.module.parameters()]
        found = strangers(leaves_of(outputs), known)
        refuse_strangers([x for x in found if isinstance(x, nn.Parameter)], self.name)
        self._strangers.look(outputs, known)

    def give_up(self, arguments: Sequence[list[Any]], why: str) -> None:
        """Note that a call ran in segments, and why such calls cannot."""
        self._programs[self._key(arguments[0])] = self.why_not = why

    def _key(self, values: Sequence[Any]) -> Any:
        """What a call has in common with others that run the same operations."""
        return (
            frozenset(settings_of(self.module).items()),
            looks_of(self.module),
            autocast_now(),
            *((id(each), each.requires_grad) for each in self.module.parameters()),
            *(
                (value.ndim, value.requires_grad)
                if isinstance(value, Tensor)
                else (type(value), repr(value))
                for value in values
            ),
        )

    @property
    def may_change(self) -> bool:
        """Whether a call that ran out of memory may run in segments."""
        return self._memory == "auto" and not self.prefers_flat


class _Chosen:
    """One call of a module by all micro-batches of a window, one way or the other.

    Args:
        engine: of the module.
        net: what is called.
        moment: what the module is like.
        draws: keeps the states of generators.
        arguments: of each micro-batch.
    """

    def __init__(
        self,
        engine: Engine,
        net: Net,
        moment: Moment,
        draws: Draws,
        arguments: Sequence[list[Any]],
    ) -> None:
        self._engine, self._net, self._moment = engine, net, moment
        self._draws, self._arguments = draws, arguments
        self._devices = devices_of(value for each in arguments for value in each)
        self._again = draws.keep(self._devices)
        self._pass: DevicePass | FlatPass = DevicePass(net, moment)

    def forward(self, *, in_one_graph: bool = False) -> None:
        """Run the module on the arguments of each micro-batch."""
        engine = self._engine
        if engine.prefers_flat and not in_one_graph and self._runs_in_segments():
            return
        try:
            self._pass = joint = DevicePass(self._net, self._moment)
            joint.forward(
                self._arguments,
                lambda outputs: engine.look_for_strangers(outputs, joint.trained),
            )
        except Exception as error:
            if not (engine.may_change and is_out_of_memory(error)):
                raise
            engine.prefers_flat = True
            release(error)
            self._begin_again()
            if not self._runs_in_segments():
                raise
        engine.is_flat = isinstance(self._pass, FlatPass)

    def _runs_in_segments(self, *, moves: bool = True) -> bool:
        """Run the module in segments, if it can be split."""
        program = self._engine.program(self._net, self._arguments)
        if program is None:
            return False
        try:
            self._pass = FlatPass(
                self._net, program, self._draws, self._moment, moves=moves
            )
            self._pass.forward(self._arguments)
        except Exception as error:
            if program.is_proven or is_out_of_memory(error):
                raise
            if isinstance(error, TrainkitError):
                raise
            # Whether it is the module's own error shows where it runs as it is.
            kind = "" if isinstance(error, Untraceable) else f"{type(error).__name__}: "
            text = str(error).split("\n")[0]
            self._engine.give_up(self._arguments, f"{self._net.name}: {kind}{text}")
            release(error)
            self._begin_again()
            return False
        self._engine.is_flat = True
        return True

    def _begin_again(self) -> None:
        """Put back what a forward pass has changed that did not end."""
        self._again()
        self._engine.attributes.undo()

    @property
    def build(self) -> Build:
        return self._pass.build

    @property
    def differentiable(self) -> list[bool]:
        return self._pass.differentiable

    @property
    def parameters(self) -> list[Tensor]:
        return self._moment.parameters

    def leaves(self, index: int) -> list[Any]:
        return self._pass.leaves(index)

    def give(self, index: int, gradients: Sequence[Tensor | None]) -> None:
        self._pass.give(index, gradients)

    def backward(self) -> Gradients:
        """The gradients of all that trains, by those that were given."""
        first = self._pass
        if not (isinstance(first, DevicePass) and self._engine.may_change):
            return first.backward()
        given = first.given
        try:
            return first.backward()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._engine.prefers_flat = True
            release(error)
            now = self._draws.keep(self._devices)
            self._again()
            del first
            self._engine.attributes.begin()
            with torch.enable_grad():  # autograd has switched it off here
                if not self._runs_in_segments(moves=False):
                    raise
            now()
        for index, gradients in enumerate(given):
            self._pass.give(index, gradients)
        return self._pass.backward()


class _Watch(TorchFunctionMode):
    """Refuses a BatchNorm that is called as a function.

    Args:
        name: of the module that runs.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (F.batch_norm, torch.batch_norm, torch.native_batch_norm):
            training = kwargs.get("training", args[5] if len(args) > 5 else False)
            if training:
                raise TrainkitError(
                    f"{self._name}: it calls functional.batch_norm(training=True), "
                    f"which normalises each micro-batch by itself. Call a layer, such "
                    f"as torch.nn.BatchNorm2d, or choose another policy."
                )
        return func(*args, **kwargs)


def _refuse_unlike(arguments: Sequence[list[Any]]) -> None:
    """Arguments that are no tensors must be the same for all micro-batches."""
    for other in arguments[1:]:
        for one, value in zip(arguments[0], other, strict=True):
            if not isinstance(value, Tensor) and not are_equal(one, value):
                raise Untraceable("an argument that is no tensor differs")


def _refuse_sharded(module: nn.Module, name: str) -> None:
    for path, each in module.named_modules():
        if isinstance(each, FSDPModule):
            raise TrainkitError(
                f"exact BatchNorm: {path or name} is sharded by FSDP2, which expects "
                f"one forward pass at a time. Use DDP, or another policy."
            )
    for path, parameter in module.named_parameters():
        if isinstance(parameter, DTensor) or is_lazy(parameter):
            what = "has no shape yet" if is_lazy(parameter) else "is sharded"
            raise TrainkitError(
                f"exact BatchNorm: {path} {what}. Run one batch before training, or "
                f"use DDP."
            )
