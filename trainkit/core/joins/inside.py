"""The inner cut of a module with BatchNorm: its chunks share statistics."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.core.batch_norm.layers import BatchNorm
from trainkit.core.inside.call import Call, Pieces
from trainkit.core.inside.cut import Cut
from trainkit.core.inside.draws import States
from trainkit.core.inside.outputs import Joined, Plan
from trainkit.core.inside.rows import Arguments
from trainkit.core.joins.engine import Engine, Memory, check_memory
from trainkit.core.joins.intercepted import Interceptions
from trainkit.core.joins.layers import Sharing, normalises_by_batch
from trainkit.core.joins.net import Pass
from trainkit.core.joins.statistics import Normal, Statistics
from trainkit.core.out_of_memory import is_out_of_memory, release
from trainkit.errors import TrainkitError


class JoinedChunks:
    """Lets the chunks of an inner cut share the statistics of BatchNorm layers.

    Layers outside of the cut see the whole batch of their rank, and with `install` all
    ranks'.

    Args:
        module: which holds all layers.
        memory: `"auto"`, `"device"` or `"flat"`.
        sharing: which ranks share statistics.
    """

    def __init__(self, module: nn.Module, memory: Memory, sharing: Sharing) -> None:
        check_memory(memory)
        self._module = module
        self._memory: Memory = memory
        self._sharing = sharing
        self._engines: dict[nn.Module, Engine] = {}
        self._intercepted = Interceptions(module, sharing, _is_layer)

    def __getstate__(self) -> dict[str, Any]:
        """A copy shares statistics with no other rank."""
        return {**vars(self), "_sharing": Sharing(), "_engines": {}}

    def install(self) -> None:
        """Let the layers ask who runs them."""
        self._intercepted.install()

    def remove(self) -> None:
        """Give the layers their own forward back."""
        self._intercepted.remove()

    @property
    def engines(self) -> list[Engine]:
        """Of the modules that were called."""
        return list(self._engines.values())

    @property
    def spans_ranks(self) -> bool:
        return self._sharing.ranks.size > 1

    @contextmanager
    def uncoupled(self, module: nn.Module) -> Iterator[None]:
        """Within it, the layers of a module normalise by statistics that do not depend
        on the rows."""
        layers = [each for each in module.modules() if normalises_by_batch(each)]
        if module in layers:
            raise TrainkitError(
                f"exact BatchNorm: a {type(module).__name__} alone cannot be cut, "
                f"since it needs the whole batch. Cut a module that holds it."
            )
        before = [vars(each).get("forward") for each in layers]
        for each in layers:
            vars(each)["forward"] = _Fixed(each)
        try:
            yield
        finally:
            for each, forward in zip(layers, before, strict=True):
                vars(each)["forward"] = forward
                if forward is None:
                    del vars(each)["forward"]

    def call(self, cut: Cut, arguments: Arguments, plan: Plan) -> JoinedCall:
        self.install()  # also the layers that have come into the module since
        if cut.module not in self._engines:
            self._engines[cut.module] = Engine(
                cut.module, cut.name, self._memory, self._sharing
            )
        return JoinedCall(self._engines[cut.module], cut, arguments, plan)


def _is_layer(module: nn.Module) -> bool:
    return isinstance(module, BatchNorm)


class JoinedCall(Call):
    """One call of a module, whose chunks see each other in its BatchNorm layers.

    Args:
        engine: runs the chunks.
        cut: what is called.
        arguments: of the call.
        plan: how outputs are joined.
    """

    _ran: Pass

    def __init__(
        self, engine: Engine, cut: Cut, arguments: Arguments, plan: Plan
    ) -> None:
        super().__init__(cut, arguments, plan)
        self._engine = engine

    def forward(self, *, has_graph: bool) -> list[Any]:
        """Run all chunks, and join the leaves of their outputs."""
        cut, versions = self._cut, self._versions()
        begun = States(self._devices, of_host=True)
        with torch.enable_grad() if has_graph else torch.no_grad():
            while True:
                self._done = cut.sizes.cut(self._arguments.rows)
                try:
                    joined = self._run_joined()
                    break
                except Exception as error:
                    is_alone = self._engine.sharing.ranks.size == 1
                    if not (is_alone and is_out_of_memory(error) and self._halves()):
                        raise
                    release(error)
                    begun.put_back()
        if versions != self._versions():
            raise TrainkitError(
                f"{cut.name}: its forward pass must not change its arguments in "
                f"place, since others may need them. Give it a clone()."
            )
        self.build, self.differentiable = self._ran.build, self._ran.differentiable
        return joined.values

    def _run_joined(self) -> Joined:
        assert self.values is not None
        cut, done, own = self._cut, self._done, weakref.ref(self)
        arguments, values = self._arguments, self.values
        self._ran = self._engine.begin(
            lambda given: cut.run(arguments, given),
            [arguments.of(chunk, values) for chunk in done],
            self.moment,
            # No reference back: what a window held must go without the collector.
            around=lambda index: cut.around(own(), done[index]),
        )
        self._engine.attributes.forget()
        self.moment.check_state()
        joined = Joined(self._plan, arguments.rows, cut.name)
        for index, chunk in enumerate(done):
            joined.add(chunk, self._ran.leaves(index))
        return joined

    def backward(
        self, values: Sequence[Any], gradients: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """One gradient for each parameter that trains, then for each argument."""
        self._refuse_graph()
        for index, chunk in enumerate(self._done):
            parts = enumerate(gradients)
            self._ran.give(index, [self._part(chunk, n, each) for n, each in parts])
        found = self._ran.backward()
        pieces = Pieces(values, self._arguments)
        for chunk, each in zip(self._done, found.arguments, strict=True):
            pieces.add(chunk, {place: each[place] for place in self.trained})
        return [*found.parameters, *pieces.gradients(self.trained)]


class _Fixed:
    """A layer's forward by statistics that do not depend on what it gets.

    Args:
        layer: whose weights are used.
    """

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def __call__(self, x: Tensor) -> Tensor:
        layer, like = self._layer, x.new_zeros(x.shape[1])
        mean, var = layer.running_mean, layer.running_var
        like = like.float() if x.dtype.itemsize < 4 else like
        known = Statistics(
            like if mean is None else mean.detach().to(like.dtype),
            like + 1 if var is None else var.detach().to(like.dtype),
            like.sum() + 1,
        )
        normal = Normal.of(layer, known)
        weight, bias = layer.weight, layer.bias
        if weight is None:
            return normal(x)
        live = Normal(known, weight.to(like.dtype), bias.to(like.dtype), layer.eps)
        return live(x)
