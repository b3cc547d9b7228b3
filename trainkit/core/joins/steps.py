"""The steps of a window's micro-batches, which wait for each other where they call a
module with BatchNorm."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.core.batch_norm.layers import BatchNorm
from trainkit.core.joins.branches import Branches, current
from trainkit.core.joins.engine import Engine, Memory, check_memory
from trainkit.core.joins.intercepted import Intercepted
from trainkit.core.joins.layers import Sharing, normalises_by_batch
from trainkit.core.joins.net import Pass
from trainkit.core.split.fields import take_apart
from trainkit.errors import TrainkitError


@dataclass
class _Call:
    """One call of a module by all micro-batches.

    Attributes:
        ran: the module's own passes.
        arguments: of each micro-batch.
        is_over: whether the gradients have been pulled through the module.
    """

    ran: Pass
    arguments: list[list[Any]]
    is_over: bool = False

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
        self._intercepted = [
            Intercepted(each, name or type(module).__name__, sharing)
            for name, each in module.named_modules()
            if any(isinstance(inner, BatchNorm) for inner in each.modules())
        ]

    def __getstate__(self) -> dict[str, Any]:
        """A copy begins anew, and shares statistics with no other rank."""
        anew = {"_calls": [], "_engines": {}, "_sharing": Sharing()}
        return {**vars(self), **anew, "_switched": _nothing}

    def install(self) -> None:
        """Let the modules wait for all micro-batches, where `run` runs them."""
        for each in self._intercepted:
            each.install()

    def remove(self) -> None:
        """Give the modules their own forward back."""
        for each in self._intercepted:
            each.remove()

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
        self._calls, self.needs_graph = [], False
        self._switched, self._in_one_graph = switched, in_one_graph
        if len(runs) == 1 and self._sharing.ranks.size == 1:
            yield runs[0]()  # it is the whole window
            return
        yield from Branches(runs, switched, self)

    def called(self, module: Intercepted, args: Any, kwargs: Any) -> Any:
        """A step calls a module."""
        holds = any(map(normalises_by_batch, module.module.modules()))
        branches = current()
        assert branches is not None
        if not holds:
            return module.original(*args, **kwargs)
        brought = take_apart((args, kwargs))
        join = partial(self._join, module)
        call, index = branches.meet(module.module, module.name, brought, join)
        return self._output(call, index)

    def _join(self, module: Intercepted, brought: list[Any]) -> list[Any]:
        """Run a module for all micro-batches."""
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
        ran = engine.begin(
            run,
            arguments,
            switched=self._switched,
            in_one_graph=self._in_one_graph,
        )
        call = _Call(ran, arguments)
        self.needs_graph |= any(
            isinstance(value, Tensor) and value.requires_grad
            for each in arguments
            for value in each
        )
        self._calls.append(call)
        return [(call, index) for index in range(len(arguments))]

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
        has_graph = torch.is_grad_enabled()
        for place, is_differentiable in enumerate(call.ran.differentiable):
            if is_differentiable and has_graph:
                leaves[place] = leaves[place].requires_grad_()
                call.watch(index, place, leaves[place])
        return call.ran.build(iter(leaves))

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
            for values, gradients in zip(call.arguments, found.arguments, strict=True):
                _deliver(values, gradients, keep=bool(calls))
            call.is_over = True


def _nothing(index: int) -> None:
    pass


def _deliver(
    tensors: Sequence[Any], gradients: Sequence[Tensor | None], *, keep: bool
) -> None:
    """Give tensors their gradients, and what they were made of."""
    pairs = zip(tensors, gradients, strict=True)
    both = [(t, g) for t, g in pairs if g is not None and t.requires_grad]
    if both:
        roots, given = zip(*both, strict=True)
        torch.autograd.backward(roots, given, retain_graph=keep)
