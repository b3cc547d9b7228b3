"""Passes of `training_step` over some rows, for their gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.core.proof.gradients import Coordinates
from trainkit.core.split.fields import with_tensors
from trainkit.core.strategies import Strategies
from trainkit.core.weighed import Weighed
from trainkit.errors import TrainkitError
from trainkit.lit._compat import replaced, step_arguments
from trainkit.lit.callback.said_weight import SaidWeight, refuse_unsaid_weight
from trainkit.lit.measure.calls import NARROW, MeasuredCalls, Seen
from trainkit.lit.measure.written import PutBackWritten
from trainkit.lit.rerun.quietly import muted
from trainkit.lit.rerun.snapshot import Snapshot


@dataclass(frozen=True)
class Term:
    """A loss that a pass went backward from.

    Attributes:
        name: of the term; "" for a loss of one term.
        loss: its value.
        gradient: the coordinates that are kept.
        weight: what the pass has said that it divides by, if it has.
    """

    name: str
    loss: float
    gradient: Tensor
    weight: float | None = None


@dataclass(frozen=True)
class Pass:
    """What `training_step` has made of a batch.

    Attributes:
        terms: one for each backward call, in order.
        seen: what its calls of torch were.
    """

    terms: tuple[Term, ...]
    seen: Seen

    @property
    def gradient(self) -> Tensor:
        return torch.stack([term.gradient for term in self.terms]).sum(0)

    def weight(self, name: str) -> float | None:
        """What the pass has said that a term divides by, if it has."""
        found = (term.weight for term in self.terms if term.name == name)
        return next(found, None)


class Passes:
    """Runs `training_step`, and puts everything back after each pass.

    Args:
        module: in `fit`, attached to its Trainer.
        num_rows: how many rows the whole has.
        in_double: whether to compute in float64.
        as_it_is: use the parameters as they are, and copy none. Otherwise each pass
            has copies that are a little off, in float64 if so asked.
        arguments: of `training_step` behind the batch; default: what Lightning passes
            with the first batch.
        move: brings a batch to the device; it may draw random numbers.
        strategies: by term; one of them may let `training_step` say weights.

    Attributes:
        num_rows: how many rows the whole has.
        names: of the parameters that train.
        parameters: those.
        in_eval: the layers that are in eval mode during a pass.
        identity_permutations: whether `torch.randperm` permutes nothing.
    """

    def __init__(
        self,
        module: Any,
        num_rows: int,
        *,
        in_double: bool,
        strategies: Strategies | None = None,
        as_it_is: bool = False,
        arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
        move: Callable[[Any], Any] = lambda batch: batch,
    ) -> None:
        self.module = module
        leading = next(iter((strategies or {}).values()), None)
        self._saying = leading if isinstance(leading, Weighed) else None
        self._said = SaidWeight()
        self.in_double = in_double
        self._as_it_is = as_it_is
        self._arguments, self._move = arguments, move
        self.num_rows = num_rows
        named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self.coordinates: Coordinates | None = None
        self.in_eval: list[nn.Module] = []
        self.identity_permutations = False
        self._snapshot: Snapshot | None = None
        self._written = PutBackWritten()
        self._draw_shapes: list[list[int]] = []

    @contextlib.contextmanager
    def prepared(self) -> Iterator[None]:
        """The module as passes need it; afterwards it is as before."""
        module = self.module
        outer = Snapshot(module, device=module.device)
        with contextlib.ExitStack() as stack:
            stack.callback(outer.restore)
            if not self._as_it_is:
                stack.enter_context(_own_values(module, self.in_double))
            stack.enter_context(muted(module))
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(_no_recurrent_dropout(module))
            if self._saying is not None:
                if not hasattr(module, "weigh"):
                    refuse_unsaid_weight(module, {"": self._saying})
                say = partial(self._said.say, strategy=self._saying)
                stack.enter_context(replaced(module, weigh=say))
            if not module.automatic_optimization:
                stack.enter_context(self._by_hand())
            self._snapshot = Snapshot(module, device=module.device)
            yield

    def run(self, batch: Any, rows: Sequence[int], *, keep_state: bool = False) -> Pass:
        """A pass over a batch of these rows.

        Args:
            batch: on the device.
            rows: their numbers, for what is drawn for all.
            keep_state: leave what the pass has changed as it is.
        """
        assert self._snapshot is not None
        if self.in_double:
            batch = with_tensors(batch, _in_double)
        calls = MeasuredCalls(
            rows,
            self.num_rows,
            in_double=self.in_double,
            permutes=not self.identity_permutations,
            shapes=self._draw_shapes,
        )
        self._terms: list[Term] = []
        try:
            with self._said.open():
                with _in_eval(self.in_eval), torch.enable_grad(), self._written, calls:
                    output = self._training_step(batch)
                if self.module.automatic_optimization:
                    self._take(output, batch)
        finally:
            if not keep_state:
                self.restore()
        return Pass(tuple(self._terms), calls.seen)

    def restore(self) -> None:
        """Put back what passes that kept their state have changed."""
        assert self._snapshot is not None
        self._written.put_back()
        self._snapshot.restore()

    def _training_step(self, batch: Any) -> Any:
        batch = self._move(batch)
        if self._arguments is None:
            return self.module.training_step(*step_arguments(self.module, batch, 0))
        args, kwargs = self._arguments
        return self.module.training_step(batch, *args, **kwargs)

    def _take(self, output: Any, batch: Any) -> None:
        loss = output.get("loss") if isinstance(output, Mapping) else output
        terms = loss if isinstance(loss, Mapping) else {"": loss}
        for name, term in terms.items():
            weight = self._said_weight(batch)
            self._add(name, term, retain=len(terms) > 1, weight=weight)

    def _said_weight(self, batch: Any) -> float | None:
        if self._saying is None:
            return None
        return float(self._said.take(self._saying, self.module, batch))

    def _add(
        self, name: str, loss: Any, *, retain: bool, weight: float | None = None
    ) -> None:
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
        gradients = torch.autograd.grad(
            loss.reshape(()), self.parameters, allow_unused=True, retain_graph=retain
        )
        if self.coordinates is None:
            sizes = [parameter.numel() for parameter in self.parameters]
            self.coordinates = Coordinates(gradients, sizes=sizes)
        vector = self.coordinates.of(gradients)
        self._terms.append(Term(name, float(loss.detach()), vector, weight))

    @contextlib.contextmanager
    def _by_hand(self) -> Iterator[None]:
        """Manual optimization: each backward call is a term; no optimizer steps."""

        def backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
            self._add(str(len(self._terms)), loss, retain=True)

        def accumulate(
            loss: Tensor, batch: Any = None, *, weight: Any = None, **kwargs: Any
        ) -> None:
            said = self._said_weight(batch) if weight is None else float(weight)
            self._add(str(len(self._terms)), loss, retain=True, weight=said)

        module = self.module
        idle = [_Idle(each) for each in module.trainer.optimizers]
        one_or_all = idle if len(idle) != 1 else idle[0]
        replacing = {
            "manual_backward": backward,
            "optimizers": lambda *args, **kwargs: one_or_all,
            "lr_schedulers": lambda: _Idle(None),
            "clip_gradients": _nothing,
            "toggle_optimizer": _nothing,
            "untoggle_optimizer": _nothing,
            # of a mixin, whose callback is not here
            "accumulate": accumulate,
            "window_ends": lambda *args, **kwargs: False,
            "finish_window": _nothing,
        }
        here = {name: it for name, it in replacing.items() if hasattr(module, name)}
        with replaced(module, **here):
            yield


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


class _Idle:
    """An optimizer or scheduler whose methods do nothing."""

    def __init__(self, of: Any) -> None:
        self._of = of
        self.param_groups = getattr(of, "param_groups", [])
        self.state: dict[Any, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: contextlib.nullcontext()

    def __iter__(self) -> Iterator[Any]:
        return iter([self, self])


@contextlib.contextmanager
def _own_values(module: nn.Module, in_double: bool) -> Iterator[None]:
    """Parameters and buffers in float64, and a little off from where they are.

    A zero gate hides what stands behind it, and a copy that equals its source hides
    that it moves.
    """
    generator = torch.Generator().manual_seed(1)
    parameters = [(p, p.data) for p in module.parameters()]
    buffers = [(each, dict(each._buffers)) for each in module.modules()]
    attributes = [(each, dict(vars(each))) for each in module.modules()]
    default = torch.get_default_dtype()
    try:
        for parameter, data in parameters:
            parameter.data = _moved(data, generator, in_double)
        if in_double:
            torch.set_default_dtype(torch.float64)
            _widen(buffers)
            _widen(attributes)
        yield
    finally:
        torch.set_default_dtype(default)
        for parameter, data in parameters:
            parameter.data = data
        for each, held in buffers:
            each._buffers.update(held)
        for each, held in attributes:
            vars(each).update(held)


def _widen(held: Sequence[tuple[nn.Module, dict[str, Any]]]) -> None:
    """Give modules the float64 copies of the buffers or attributes that they hold."""
    for module, values in held:
        for name, value in values.items():
            if isinstance(value, Tensor) and value.dtype in NARROW:
                place = module._buffers if name in module._buffers else vars(module)
                place[name] = value.double()


def _moved(data: Tensor, generator: torch.Generator, in_double: bool) -> Tensor:
    if not data.is_floating_point():
        return data
    wide = data.double() if in_double else data.clone()
    spread = float(wide.std()) if wide.numel() > 1 else 0.0
    noise = torch.randn(wide.shape, generator=generator, dtype=torch.float64)
    return wide + (0.05 * spread or 0.02) * noise.to(wide)


def _in_double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.dtype in NARROW else tensor


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
