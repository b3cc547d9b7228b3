"""The steps of a window's micro-batches, which wait for each other where they call a
module with BatchNorm."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.core.batch_norm.layers import BatchNorm, listed
from trainkit.core.joins.attributes import Attributes, OwnInSteps
from trainkit.core.joins.branches import Branches, current
from trainkit.core.joins.engine import Engine, Memory, check_memory
from trainkit.core.joins.intercepted import Intercepted, Interceptions
from trainkit.core.joins.joint_graph import Beginning
from trainkit.core.joins.layers import Sharing, normalises_by_batch
from trainkit.core.joins.net import Pass
from trainkit.core.nested import take_apart
from trainkit.errors import TrainkitError


@dataclass
class _Call:
    """One call of a module by all micro-batches.

    Attributes:
        ran: the module's own passes.
        arguments: of each micro-batch.
        attributes: what its forward has set for each.
        is_over: whether the gradients have been pulled through the module.
        has_arrived: whether a gradient of its outputs has arrived.
    """

    ran: Pass
    arguments: list[list[Any]]
    attributes: Attributes
    is_over: bool = False
    has_arrived: bool = False

    def watch(self, index: int, place: int, leaf: Tensor) -> None:
        """Hand on the gradients of a leaf of a micro-batch's output as they arrive, so
        that nothing here holds the leaf."""

        def arrived(leaf: Tensor) -> None:
            if self.is_over:
                raise TrainkitError(
                    "exact BatchNorm: a loss was pulled after the window had ended, "
                    "so that its gradient would not reach the module. Call backward() "
                    "in the loop over run()."
                )
            self.has_arrived = True
            found: list[Tensor | None] = [None] * len(self.ran.differentiable)
            found[place], leaf.grad = leaf.grad, None
            self.ran.give(index, found)

        leaf.register_post_accumulate_grad_hook(arrived)


class JoinedSteps:
    """Runs a step for each micro-batch of a window, so that the BatchNorm layers of a
    module see the whole window.

    Where a step calls the module, or one in it that holds such layers, it waits until
    all have come there. The gradients of the loss are pulled micro-batch by micro-batch
    down to that call, and from there for all at once, by `backward`.

    Args:
        module: what trains.
        memory: `"auto"`, `"device"` or `"flat"`.
        sharing: which ranks share statistics.

    Attributes:
        needs_graph: whether a backward pass of a micro-batch must keep its graph,
            since something before a call trains too.
    """

    def __init__(self, module: nn.Module, memory: Memory, sharing: Sharing) -> None:
        check_memory(memory)
        self._memory: Memory = memory
        self._sharing = sharing
        self._engines: dict[nn.Module, Engine] = {}
        self._calls: list[_Call] = []
        self._switched: Callable[[int], None] = _nothing
        self._in_one_graph = False
        self.needs_graph = False
        self._own = OwnInSteps(module)
        self._left: set[tuple[str, str]] = set()
        self._warned: set[str] = set()
        self._index, self._is_running, self._is_there = 0, False, False
        self._intercepted = Interceptions(module, sharing, _holds_layers)

    def __getstate__(self) -> dict[str, Any]:
        """A copy begins anew, and shares statistics with no other rank."""
        anew = {"_calls": [], "_engines": {}, "_sharing": Sharing()}
        return {**vars(self), **anew, "_switched": _nothing, "_is_running": False}

    def install(self) -> None:
        """Let the modules wait for all micro-batches, where `run` runs them."""
        self._is_there = True
        self._intercepted.install()

    def remove(self) -> None:
        """Give the modules their own forward back."""
        self._is_there = False
        self._intercepted.remove()

    @property
    def engines(self) -> list[Engine]:
        """Of the modules that were called."""
        return list(self._engines.values())

    def run(
        self,
        runs: Sequence[Callable[[], Any]],
        switched: Callable[[int], None] = lambda index: None,
        *,
        in_one_graph: bool = False,
    ) -> Generator[Any, None, None]:
        """What each step returns, in order. Its gradients are to be pulled before the
        next is asked for; `backward` belongs behind the last.

        Args:
            runs: the steps.
            switched: is called with the number of the micro-batch that runs next.
            in_one_graph: let no module run in segments.
        """
        self._refuse_run(runs)
        self.install()  # also what has come into the module since
        self._calls, self.needs_graph = [], False
        self._switched, self._in_one_graph = switched, in_one_graph
        if len(runs) == 1 and self._sharing.ranks.size == 1:
            yield runs[0]()  # it is the whole window
            return
        self._own.begin()
        self._is_running = True
        try:
            with closing(iter(Branches(runs, self._turn, self))) as results:
                yield from results
        finally:
            self._is_running = False
            self._own.end()

    def _refuse_run(self, runs: Sequence[Any]) -> None:
        what = ""
        if not self._is_there:
            what = "remove() has given the module its own forward back"
        elif self._is_running:
            what = "another window of this module is not over yet"
        elif not runs:
            what = "it needs at least one micro-batch, and received none"
        if what:
            raise TrainkitError(f"exact BatchNorm run: {what}.")

    def _turn(self, index: int) -> None:
        """Let the step of another micro-batch run next."""
        self._switched(index)
        self._index = index
        self._own.resume(index)
        for call in self._calls:
            call.attributes.resume(index)
        self._own.look(index)

    def called(self, module: Intercepted, args: Any, kwargs: Any) -> Any:
        """A step calls a module."""
        holds = any(map(normalises_by_batch, module.module.modules()))
        branches = current()
        assert branches is not None
        if not holds:
            return module.original(*args, **kwargs)
        self._own.arrive(self._index, module.name)
        if module.module in self._engines:
            self._engines[module.module].attributes.arrive(self._index)
        brought = take_apart((args, kwargs))
        join = partial(self._join, module)
        call, index = branches.meet(module.module, module.name, brought, join)
        return self._output(call, index)

    def _join(self, module: Intercepted, brought: list[Any]) -> list[Any]:
        """Run a module for all micro-batches."""
        self._own.refuse_unlike(module.module, module.name)
        engine = self._engine(module)
        paths = {tuple(field.path for field in fields) for fields, _ in brought}
        if len(paths) > 1:
            raise TrainkitError(
                f"exact BatchNorm: all micro-batches must call {module.name} with the "
                f"same arguments, and some have others."
            )
        _, build = brought[0]

        own = module if module.normalises else module.original

        def run(values: list[Any]) -> Any:
            args, kwargs = build(iter(values))
            return own(*args, **kwargs)

        arguments = [[field.value for field in fields] for fields, _ in brought]
        _refuse_hidden_graphs(f"{module.name} is called with", arguments)
        ran = engine.begin(
            run,
            arguments,
            switched=self._switched,
            in_one_graph=self._in_one_graph,
        )
        call = _Call(ran, arguments, engine.attributes)
        self._warn_of_left(module.name, engine.attributes.left)
        self.needs_graph |= any(
            isinstance(value, Tensor) and value.requires_grad
            for each in arguments
            for value in each
        )
        self._calls.append(call)
        return [(call, index) for index in range(len(arguments))]

    def _warn_of_left(self, name: str, left: list[str]) -> None:
        """Warn of what a forward leaves in attributes, the second time: a cache is left
        once."""
        again = [each for each in left if (name, each) in self._left]
        self._left |= {(name, each) for each in left}
        if again and name not in self._warned and self._sharing.ranks.index == 0:
            self._warned.add(name)
            warnings.warn(
                f"exact BatchNorm: {name}: its forward leaves values in "
                f"{listed(again)}. Each micro-batch has its own, and the last one's "
                f"stay: what adds up there adds up the last micro-batches. Return "
                f"such values, and add them up in the step.",
                stacklevel=2,
            )

    def _engine(self, module: Intercepted) -> Engine:
        if module.module not in self._engines:
            # A layer that is called by itself has no segments.
            memory = "device" if module.normalises else self._memory
            engine = Engine(module.module, module.name, memory, self._sharing)
            self._engines[module.module] = engine
        return self._engines[module.module]

    def _output(self, call: _Call, index: int) -> Any:
        """What a step gets from its call: leaves from which its graph begins."""
        leaves = call.ran.leaves(index)
        _refuse_hidden_graphs("a module with BatchNorm returns", [leaves])
        has_graph = torch.is_grad_enabled()
        for place, is_differentiable in enumerate(call.ran.differentiable):
            if is_differentiable and has_graph:
                leaf = leaves[place].requires_grad_()
                call.watch(index, place, leaf)
                leaves[place] = Beginning.apply(leaf)
        return call.ran.build(iter(leaves))

    @property
    def has_gradients(self) -> bool:
        """Whether a gradient has come to a module, if one could."""
        could = [call for call in self._calls if any(call.ran.differentiable)]
        return not could or any(call.has_arrived for call in could)

    def backward(self) -> None:
        """Pull the gradients through the modules, the last call first, once those of
        all micro-batches have come to them."""
        calls, self._calls = self._calls, []
        while calls:
            call = calls.pop()
            if not any(call.ran.differentiable):
                continue  # it ran under no_grad, and kept nothing
            found = call.ran.backward()
            _deliver(call.ran.parameters, found.parameters, keep=False)
            values = [value for each in call.arguments for value in each]
            gradients = [each for own in found.arguments for each in own]
            _deliver(values, gradients, keep=bool(calls))
            call.is_over = True


def _nothing(index: int) -> None:
    pass


def _holds_layers(module: nn.Module) -> bool:
    return any(isinstance(each, BatchNorm) for each in module.modules())


def _refuse_hidden_graphs(where: str, values: Sequence[Sequence[Any]]) -> None:
    """Refuse objects that hold tensors with a gradient, which would not get there."""
    for value in (value for each in values for value in each):
        held = [] if isinstance(value, Tensor) else getattr(value, "__dict__", {})
        for key in held:
            if isinstance(held[key], Tensor) and held[key].requires_grad:
                raise TrainkitError(
                    f"exact BatchNorm: {where} a {type(value).__name__}, whose {key} "
                    f"has a gradient that would be lost. Use tensors, or tuples and "
                    f"dicts of them."
                )


def _deliver(
    tensors: Sequence[Any], gradients: Sequence[Tensor | None], *, keep: bool
) -> None:
    """Give tensors their gradients, and what they were made of."""
    pairs = zip(tensors, gradients, strict=True)
    both = [(t, g) for t, g in pairs if g is not None and t.requires_grad]
    if both:
        roots, given = zip(*both, strict=True)
        torch.autograd.backward(roots, given, retain_graph=keep)
