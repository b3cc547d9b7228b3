"""The choice between one graph and segments, for the calls of one module."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from trainkit.core.inside.moment import Moment
from trainkit.core.inside.shadows import leaves_of, refuse_strangers
from trainkit.core.joins.attributes import Attributes
from trainkit.core.joins.device import DevicePass
from trainkit.core.joins.draws import Draws
from trainkit.core.joins.flat import FlatPass
from trainkit.core.joins.host import transport_to
from trainkit.core.joins.layers import Sharing, devices_of, refuse_other_layers
from trainkit.core.joins.net import (
    Around,
    Gradients,
    Net,
    Pass,
    layers_of,
    nothing_around,
)
from trainkit.core.joins.program import Untraceable
from trainkit.core.joins.programs import Programs
from trainkit.core.joins.strangers import Strangers, strangers
from trainkit.core.joins.transport import Transport
from trainkit.core.joins.watch import Watch, refuse_sharded
from trainkit.core.nested import Build
from trainkit.core.out_of_memory import is_out_of_memory, release
from trainkit.errors import TrainkitError

Memory = Literal["auto", "device", "flat"]


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
        programs: its forwards in segments.
    """

    def __init__(
        self, module: nn.Module, name: str, memory: Memory, sharing: Sharing
    ) -> None:
        check_memory(memory)
        self.module, self.name = module, name
        self.is_flat = False
        self.sharing = sharing
        self._memory: Memory = memory
        self.prefers_flat = memory == "flat"
        self.programs = Programs(module)
        self._draws = Draws()
        self.attributes = Attributes(module, name)
        self._strangers = Strangers(name)
        self._is_first, self._has_said = True, False

    def __getstate__(self) -> dict[str, Any]:
        """A copy begins anew: programs are another module's."""
        anew = {"programs": None, "_draws": Draws(), "_is_first": True}
        return {**vars(self), **anew, "_strangers": Strangers(self.name)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, programs=Programs(state["module"]))

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
        refuse_sharded(self.module, self.name)
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
        watch = Watch(net, moment, is_first=self._is_first)
        found = _Chosen(self, net, moment, self._draws, arguments)
        self.attributes.begin()
        with watch:
            found.forward(in_one_graph=in_one_graph)
        self.attributes.end()
        watch.check()
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

    @property
    def why_not(self) -> str:
        """Why the module does not run in segments, if it was tried."""
        return self.programs.why_not

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
        program = self._engine.programs.get(self._net, self._arguments)
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
            why = f"{self._net.name}: {kind}{text}"
            self._engine.programs.give_up(program, why)
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
