"""Passes of `training_step` over some rows, for their gradients."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.core._compat import run_backward, without_gradient_hooks
from trainkit.core.proof.gradients import Coordinates, added
from trainkit.core.split.fields import with_tensors
from trainkit.core.strategies import Strategies
from trainkit.core.weighed import Weighed
from trainkit.errors import TrainkitError
from trainkit.lit._compat import replaced, step_arguments
from trainkit.lit.callback.said_weight import SaidWeight, refuse_unsaid_weight
from trainkit.lit.measure.beside import Beside
from trainkit.lit.measure.by_hand import Plain, by_hand
from trainkit.lit.measure.calls import MeasuredCalls
from trainkit.lit.measure.draws import Draws
from trainkit.lit.measure.host_draws import drawn_unseen, global_states, replayed
from trainkit.lit.measure.own_values import own_values, widened
from trainkit.lit.measure.registries import Registries
from trainkit.lit.measure.terms import Pass, Term
from trainkit.lit.measure.written import PutBackWritten
from trainkit.lit.rerun.gradients import StashedGradients
from trainkit.lit.rerun.quietly import muted
from trainkit.lit.rerun.snapshot import Snapshot


class Passes:
    """Runs `training_step`, and puts everything back after each pass.

    Args:
        module: in `fit`, attached to its Trainer.
        num_rows: how many rows the whole has.
        dtype: of the arithmetic; None for the run's own, with its autocast.
        strategies: by term; one of them may let `training_step` say weights.
        as_it_is: use parameters and buffers as they are. Otherwise passes get copies
            that are a little off, in the dtype.
        arguments: of `training_step` behind the batch; default: what Lightning passes
            with the first batch.
        move: brings a batch to the device; it may draw random numbers.

    Attributes:
        num_rows: how many rows the whole has.
        names: of the parameters that train.
        parameters: those, or within `prepared` what stands in for them.
        in_eval: the layers that are in eval mode during a pass.
        draws: replays random numbers by row.
        without_hooks: whether hooks that `training_step` registers do not run.
        num_chunks: how many chunks of submodules have run.
        iterators: where the module and its files hold some, from `prepared` on.
        scale: what losses are multiplied by while gradients are in half precision.
        beside: lets BatchNorm see all rows in a pass over some, if the run does.
    """

    def __init__(
        self,
        module: Any,
        num_rows: int,
        *,
        dtype: torch.dtype | None,
        strategies: Strategies | None = None,
        as_it_is: bool = False,
        arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
        move: Callable[[Any], Any] = lambda batch: batch,
    ) -> None:
        self.module = module
        self.num_rows, self.dtype = num_rows, dtype
        leading = next(iter((strategies or {}).values()), None)
        self._saying = leading if isinstance(leading, Weighed) else None
        self._said = SaidWeight()
        self._as_it_is = as_it_is
        self._arguments, self._move = arguments, move
        named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        self.names = [name for name, _ in named]
        self.parameters = self._own_parameters = [parameter for _, parameter in named]
        self.coordinates: Coordinates | None = None
        self.in_eval: list[nn.Module] = []
        self.draws = Draws(num_rows)
        self.iterators: list[str] = []
        self.scale = 1.0
        self.without_hooks = False
        self._snapshot: Snapshot | None = None
        self._registries: Registries | None = None
        self._modes: list[tuple[nn.Module, bool]] = []
        self._flags: list[tuple[Tensor, bool]] = []
        self._put_back: Callable[[], None] = lambda: None
        self._written = PutBackWritten()
        self._clear_hooks: Callable[[], None] = lambda: None
        self._terms: list[Term] = []
        self._gradients: list[Tensor | None] | None = None
        self._calls: Any = contextlib.nullcontext()
        self._thread = threading.get_ident()
        self.num_chunks = 0
        self.beside: Beside | None = None

    @contextlib.contextmanager
    def prepared(self) -> Iterator[None]:
        """The module as passes need it; afterwards it is as before."""
        module = self.module
        outer = Snapshot(module, device=module.device)
        self.iterators = list(outer.iterators)
        with contextlib.ExitStack() as stack:
            stack.callback(outer.restore)
            stack.callback(StashedGradients(module.parameters()).put_back)
            if not self._as_it_is:
                stack.enter_context(own_values(module, self.dtype))
            stack.callback(setattr, self, "parameters", self.parameters)
            self.parameters = [p for p in module.parameters() if p.requires_grad]
            self._clear_hooks = stack.enter_context(
                without_gradient_hooks([*self.parameters, *self._own_parameters])
            )
            stack.enter_context(muted(module))
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(_no_recurrent_dropout(module))
            if module.trainer.world_size > 1:
                stack.enter_context(replaced(module, all_gather=_refuse_gathering))
            if self._saying is not None:
                if not hasattr(module, "weigh"):
                    refuse_unsaid_weight(module, {"": self._saying})
                say = partial(self._said.say, strategy=self._saying)
                stack.enter_context(replaced(module, weigh=say))
            if not module.automatic_optimization:
                stack.enter_context(by_hand(module, self._add_by_hand))
            self._put_back = stack.enter_context(replayed(module, self.draws))
            self._snapshot = Snapshot(module, device=module.device)
            self._registries = Registries(module, module.trainer.optimizers)
            self.iterators += self._registries.values.iterators
            self._modes = [(each, each.training) for each in module.modules()]
            self._flags = [(p, p.requires_grad) for p in module.parameters()]
            yield

    def run(self, batch: Any, rows: Sequence[int], *, keep_state: bool = False) -> Pass:
        """A pass over a batch of these rows.

        Args:
            batch: on the device.
            rows: their numbers, for what is drawn for all.
            keep_state: leave what the pass has changed as it is.
        """
        dtype = self.dtype
        if dtype is not None:
            batch = with_tensors(batch, lambda each: widened(each, dtype))
        while True:
            self.draws.begin(rows)
            states = global_states()
            try:
                found = self._run(batch, rows)
                self.draws.unlike.update(drawn_unseen(states))
            finally:
                self.draws.is_active = False
                if not keep_state:
                    self.restore()
            if not self.draws.end():
                return found
            self.restore()

    def gradients(self, batch: Any, rows: Sequence[int]) -> list[Tensor | None]:
        """All coordinates of the gradients of a pass, over all its terms."""
        self._gradients = [None for _ in self.parameters]
        try:
            self.run(batch, rows)
            return self._gradients
        finally:
            self._gradients = None

    @property
    def turning(self) -> list[Any]:
        """What draws for the chunk under way, if anything does."""
        return [self.draws] if self.draws.are_any else []

    def _run(self, batch: Any, rows: Sequence[int]) -> Pass:
        calls = self._calls = MeasuredCalls(
            dtype=self.dtype, draws=self.draws, without_hooks=self.without_hooks
        )
        self._terms = []
        if self._gradients is not None:
            self._gradients = [None for _ in self.parameters]
        with (
            self._said.open(),
            _in_eval(self.in_eval),
            torch.enable_grad(),
            self._written,
            calls,
        ):
            if self.beside is not None and len(rows) < self.num_rows:
                step, turning = self._training_step, [self.draws, self._said]
                with self.beside.running(step, batch, rows, turning) as output:
                    self._take(output, batch)
            else:
                output = self._training_step(batch)
                if self.module.automatic_optimization:
                    self._take(output, batch)
        if not self._terms:
            raise TrainkitError(
                "training_step: it went backward from no loss, so there is nothing to "
                "compare. Check with a batch from which it trains."
            )
        return Pass(tuple(self._terms), calls.seen)

    def _training_step(self, batch: Any) -> Any:
        with self._own_precision():
            batch = self._move(batch)
            if self._arguments is None:
                return self.module.training_step(*step_arguments(self.module, batch, 0))
            args, kwargs = self._arguments
            return self.module.training_step(batch, *args, **kwargs)

    def _own_precision(self) -> Any:
        if self.dtype is not None:
            return contextlib.nullcontext()
        return self.module.trainer.precision_plugin.forward_context()

    @contextlib.contextmanager
    def around_chunk(self, call: Any, chunk: Any) -> Iterator[None]:
        """The context of a chunk of a module's call; without one, of its probe.

        Its second pass may run in a thread of autograd's, where no call is seen.
        """
        if chunk is None:
            was_active, self.draws.is_active = self.draws.is_active, False
            try:
                yield
            finally:
                self.draws.is_active = was_active
            return
        self.num_chunks += 1
        is_here = threading.get_ident() == self._thread
        own = self.draws.of_chunk(call, chunk.start, chunk.stop, call.num_rows)
        with contextlib.nullcontext() if is_here else self._calls, own:
            yield

    def restore(self) -> None:
        """Put back what passes that kept their state have changed."""
        assert self._snapshot is not None
        assert self._registries is not None
        with contextlib.ExitStack() as stack:  # each runs, also if another fails
            stack.callback(self._clear_hooks)
            stack.callback(self._put_back_modes)
            stack.callback(self._put_back)
            stack.callback(self._snapshot.restore)
            stack.callback(self._registries.put_back)
            stack.callback(self._written.put_back)

    @property
    def lost(self) -> list[str]:
        """The caches that could not be put back."""
        if self._snapshot is None or self._registries is None:
            return []
        return list(self._snapshot.lost | self._registries.values.lost)

    def _put_back_modes(self) -> None:
        for each, mode in self._modes:
            each.training = mode
        for parameter, trains in self._flags:
            if parameter.requires_grad != trains:
                parameter.requires_grad_(trains)

    def _take(self, output: Any, batch: Any) -> None:
        loss = output.get("loss") if isinstance(output, Mapping) else output
        terms = loss if isinstance(loss, Mapping) else {"": loss}
        if self.beside is not None:
            self.beside.refuse_several(terms)
        for name, term in terms.items():
            weight = self._said_weight(batch)
            retain = len(terms) > 1 or self.beside is not None
            self._add(name, term, retain=retain, weight=weight)

    def _said_weight(self, batch: Any) -> Any:
        if self._saying is None:
            return None
        return self._said.take(self._saying, self.module, batch)

    def _add_by_hand(self, loss: Tensor, batch: Any, weight: Any) -> None:
        weight = self._said_weight(batch) if weight is None else weight
        self._add(str(len(self._terms)), loss, retain=True, batch=batch, weight=weight)

    def _add(
        self,
        name: str,
        loss: Any,
        *,
        retain: bool,
        batch: Any = None,
        weight: Any = None,
    ) -> None:
        _check_loss(loss)
        own = {id(each) for each in self.parameters}
        others = [each for each in self._own_parameters if id(each) not in own]
        gradients = run_backward(
            loss.reshape(()) * self.scale if self.scale != 1 else loss.reshape(()),
            [*self.parameters, *others],
            retain=retain,
            # The gradients of a window arrive at leaves, before DDP expects any.
            alone=self.module.trainer.world_size > 1 and self.beside is None,
        )
        if any(each is not None for each in gradients[len(self.parameters) :]):
            raise TypeError("training_step reaches parameters outside of their modules")
        del gradients[len(self.parameters) :]
        if self.beside is not None:
            pairs = zip(gradients, self.beside.rest(self.parameters), strict=True)
            gradients = [added(one, other) for one, other in pairs]
        if self.coordinates is None:
            sizes = [parameter.numel() for parameter in self.parameters]
            self.coordinates = Coordinates(gradients, sizes=sizes)
        vector = self.coordinates.of(gradients) / self.scale
        given = None if weight is None else float(weight)
        value, is_plain = float(loss.detach()), isinstance(weight, Plain)
        self._terms.append(Term(name, value, vector, batch, given, is_plain))
        if self._gradients is not None:
            pairs = zip(self._gradients, gradients, strict=True)
            # Copies: what was written in a pass is put back after it.
            self._gradients = [
                added(one, None if other is None else other.clone())
                for one, other in pairs
            ]


def _refuse_gathering(*args: Any, **kwargs: Any) -> None:
    raise TrainkitError(
        "training_step: self.all_gather waits for other ranks, which run other parts "
        "of their batches. Check with one device: Trainer(devices=1, strategy='auto')."
    )


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise TrainkitError(
            f"training_step: check needs a loss of one number, received "
            f"{type(loss).__name__}"
            f"{list(loss.shape) if isinstance(loss, Tensor) else ''}."
        )
    if not loss.requires_grad:
        raise TrainkitError(
            "training_step: its loss has no gradient. Check that parameters take "
            "part in it and are not frozen."
        )


@contextlib.contextmanager
def _no_recurrent_dropout(module: nn.Module) -> Iterator[None]:
    layers = [m for m in module.modules() if isinstance(m, nn.RNNBase) and m.dropout]
    kept = [layer.dropout for layer in layers]
    for layer in layers:
        layer.dropout = 0.0
    try:
        yield
    finally:
        for layer, dropout in zip(layers, kept, strict=True):
            layer.dropout = dropout


@contextlib.contextmanager
def _in_eval(layers: Sequence[nn.Module]) -> Iterator[None]:
    training = [layer for layer in layers if layer.training]
    for layer in training:
        layer.training = False
    try:
        yield
    finally:
        for layer in training:
            layer.training = True
