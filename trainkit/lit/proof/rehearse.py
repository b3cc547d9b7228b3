"""Rehearsals: one optimizer step of a copy, in a quiet Trainer of its own."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from torch import Tensor, nn

from trainkit.core.generators import random_kept, seed_all
from trainkit.core.nested import with_tensors
from trainkit.core.split.micro_batching import MicroBatching
from trainkit.core.strategies import AccumulationStrategy, Strategies, Uniform
from trainkit.lit._compat import (
    has_own,
    quiet_trainer,
    stand_where,
    unwrapped,
)
from trainkit.lit.batch_norm.guard import BatchNormGuard
from trainkit.lit.callback.base import OrderedCallback, no_callbacks, windows_of
from trainkit.lit.proof.copying import Copies, move_weights
from trainkit.lit.proof.draws import SEED, Draws, WritesShared
from trainkit.lit.proof.verdict import NotMeasured

MOST_WIDE = 2**27
"""With more parameters, none are copied to float64."""

_BEFORE = (
    "prepare_data", "setup", "configure_model", "on_fit_start", "on_train_start",
    "on_train_epoch_start", "on_sanity_check_start", "on_sanity_check_end",
)  # fmt: skip
_AFTER = (
    "on_train_epoch_end",
    "on_train_end",
    "on_fit_end",
    "on_exception",
    "teardown",
)
"""Hooks that do not run again on a copy."""

OF_A_STEP = (
    "on_train_batch_start", "on_train_batch_end", "on_before_zero_grad",
    "on_before_backward", "on_after_backward", "on_before_optimizer_step",
)  # fmt: skip

NO_WEIGHT = 0.25
"""What the losses of a rehearsed window are divided by first: no rows weigh so much, so
that a hook which looks at a gradient before the window is complete shows."""

PARAMETER_HOOKS = "hooks of parameters"
"""The name by which `Plan.without` takes all of these away."""

_LIGHTNINGS = ("lightning.pytorch", "pytorch_lightning", "lightning.fabric")


class Ended(BaseException):
    """Ends a rehearsal; no code that catches errors catches it."""


@dataclass(frozen=True)
class Plan:
    """How rows are run.

    Attributes:
        strategies: what a micro-batch weighs; None for plain Lightning.
        options: how loader batches are cut, if they are.
        without: hooks of the module, and names of callbacks, that are taken away.
        as_whole: whether the module finds the Trainer's numbers of the big batch.
        change: what else is done to the copy before it runs.
        fixes_draws: whether what rows share is drawn alike for all parts.
    """

    strategies: AccumulationStrategy | Strategies | None = None
    options: MicroBatching | None = None
    without: frozenset[str] = frozenset()
    as_whole: bool = False
    change: Callable[[nn.Module], Any] | None = None
    fixes_draws: bool = False

    @property
    def has_driver(self) -> bool:
        """Whether trainkit takes part."""
        return self.strategies is not None or self.options is not None


PLAIN = Plan()
"""Plain Lightning, without trainkit."""


@dataclass
class Taken:
    """What a rehearsal has found: the gradients that the optimizers would have taken.

    Attributes:
        gradients: by the optimizer's number, the number of its step, and the name of
            the parameter.
        num_calls: how often optimizers stepped.
        draws: of random numbers.
        result: what `Plan.change` has returned.
        losses: before each backward pass.
    """

    draws: Draws
    gradients: dict[tuple[int, int, str], Tensor] = field(default_factory=dict)
    num_calls: int = 0
    result: Any = None
    losses: list[float] = field(default_factory=list)

    @property
    def size(self) -> float:
        """The norm of all gradients."""
        return _norm(list(self.gradients.values()))

    def off_from(self, whole: Taken) -> float:
        """How far these gradients are from others, as a share of their size."""
        size, off = whole.size, math.hypot(*(b for _, b in whole.beside(self).values()))
        return off / size if size else float(off > 0)

    def beside(self, other: Taken) -> dict[tuple[int, int, str], tuple[float, float]]:
        """The size of each gradient, and how far another one is from it."""
        found = {}
        for key in {**self.gradients, **other.gradients}:
            one, two = self.gradients.get(key), other.gradients.get(key)
            apart = two if one is None else one if two is None else one - two
            own = 0.0 if one is None else _norm([one])
            found[key] = own, _norm([] if apart is None else [apart])
        return found


def combined(taken: Sequence[Taken], weights: Sequence[float]) -> Taken:
    """The weighted sum of several rehearsals."""
    found = Taken(taken[0].draws, num_calls=taken[0].num_calls)
    for each, weight in zip(taken, weights, strict=True):
        for key, gradient in each.gradients.items():
            before = found.gradients.get(key)
            own = gradient * weight
            found.gradients[key] = own if before is None else before + own
    return found


class Rehearsals:
    """Rehearses steps of a module in `fit`, on copies of it.

    Args:
        trainer: to which the module is attached.
        module: of which copies run.
        driver: the callback that divides the run's windows.
        dtype: of the arithmetic.
        callbacks: the run's; default: the Trainer's.

    Attributes:
        dtype: of the arithmetic.
        callbacks: the run's.
    """

    def __init__(
        self,
        trainer: Any,
        module: Any,
        driver: Any,
        *,
        dtype: torch.dtype = torch.float32,
        callbacks: Sequence[Any] | None = None,
    ) -> None:
        self._trainer, self._module, self._driver = trainer, module, driver
        own = [p.dtype for p in module.parameters() if p.is_floating_point()]
        self.dtype = torch.float64 if torch.float64 in own else dtype
        self.callbacks = trainer.callbacks if callbacks is None else callbacks
        self._shares = True

    def in_dtype(self, dtype: torch.dtype) -> Rehearsals:
        """Rehearsals of the same module in another arithmetic."""
        number = sum(each.numel() for each in self._module.parameters())
        if dtype is torch.float64 and number > MOST_WIDE:
            raise NotMeasured("too many parameters to copy in float64")
        of = self._trainer, self._module, self._driver
        return Rehearsals(*of, dtype=dtype, callbacks=self.callbacks)

    def run(
        self,
        batches: Sequence[Any],
        rows: Sequence[Sequence[int]],
        plan: Plan = PLAIN,
        *,
        seed: int = SEED,
    ) -> Taken:
        """The gradients of one step over some batches, with which it would end.

        Args:
            batches: loader batches of one window, as the loader would yield them.
            rows: the rows in each, by their numbers in the big batch.
            plan: how they are run.
            seed: of what draws unseen.
        """
        try:
            return self._run(batches, rows, plan, seed)
        except WritesShared:
            self._shares = False
            return self._run(batches, rows, plan, seed)

    def _run(self, batches: Sequence[Any], rows: Any, plan: Plan, seed: int) -> Taken:
        live = windows_of(self._trainer)
        with contextlib.nullcontext() if live is None else live.bare():
            copies = Copies(self._trainer, self._module, shares=self._shares)
            callbacks = self._callbacks(copies, plan)
        module, now = copies.module, _Now(rows)
        self._prepare(module, plan)
        move_weights(module, copies.shared)
        draws = Draws(now.rows, self.dtype, copies.shared, fixes=plan.fixes_draws)
        draws.turn_off(module)
        taken = Taken(draws)
        if plan.has_driver:
            own = self._driver.for_copy(module, plan.strategies, plan.options)
            callbacks += [] if own is None else [own]
        has_window = plan.has_driver or module.automatic_optimization
        trainer = quiet_trainer(
            self._trainer,
            callbacks=[*callbacks, _Taker(taken, now, len(batches), plan)],
            precision="64-true" if self.dtype is torch.float64 else "32-true",
            accumulate_grad_batches=len(batches) if has_window else 1,
        )
        stand_where(trainer, self._trainer)
        if plan.change is not None:
            taken.result = plan.change(module)
        own = [_own_batch(each, self.dtype) for each in batches]
        loader = _Batches(own, rows, now, self._trainer.train_dataloader)
        data = self._data(loader, plan)
        kept = random_kept(self._trainer.strategy.root_device)
        with _quiet(), kept, _full_precision(self.dtype), draws:
            seed_all(seed)
            with contextlib.suppress(Ended):
                trainer.fit(module, **data)
        if not taken.num_calls:
            raise NotMeasured("the optimizer took no step after these rows")
        return taken

    def _prepare(self, module: Any, plan: Plan) -> None:
        """Let a copy be what a step needs, and no more."""
        own = vars(module)
        own["configure_callbacks"] = _no_callbacks if plan.has_driver else no_callbacks
        own.update(
            {name: _nothing for name in (*_BEFORE, *_AFTER) if name in dir(module)}
        )
        for name in plan.without:
            if hasattr(LightningModule, name):
                own[name] = MethodType(getattr(LightningModule, name), module)
            for parameter in module.parameters() if name == PARAMETER_HOOKS else ():
                parameter._backward_hooks = None
                parameter._post_accumulate_grad_hooks = None
        is_narrow = any(p.dtype.itemsize < 4 for p in module.parameters())
        if self.dtype is torch.float64 or is_narrow:
            module.to(self.dtype)
        for each in module.modules():
            experts: Any = getattr(each, "config", None)
            if hasattr(experts, "_experts_implementation"):
                experts._experts_implementation = "eager"  # others know no float64
            for name, value in vars(each).items():
                if isinstance(value, Tensor) and value.is_floating_point():
                    vars(each)[name] = value.to(self.dtype)
            if isinstance(each, nn.SyncBatchNorm):
                each.__class__ = _Alone

    def _data(self, loader: Any, plan: Plan) -> dict[str, Any]:
        """What a quiet Trainer trains on: the data module's hooks stay."""
        live = self._trainer.datamodule
        if live is None:
            return {"train_dataloaders": loader}
        data = copy.copy(live)
        names = (*_BEFORE, *_AFTER, "state_dict", "load_state_dict")
        vars(data).update({name: _nothing for name in names})
        for name in plan.without:
            if hasattr(LightningDataModule, name):
                own = getattr(LightningDataModule, name)
                vars(data)[name] = MethodType(own, data)
        vars(data)["train_dataloader"] = lambda: loader
        return {"datamodule": data}

    def _callbacks(self, copies: Copies, plan: Plan) -> list[Any]:
        """Copies of the callbacks that may change a step."""
        found = []
        for each in self.callbacks:
            name = type(each).__name__
            if name in plan.without or not _matters(each, plan):
                continue
            copied = copies.of(each, name)
            if not isinstance(copied, OrderedCallback):
                vars(copied).update(dict.fromkeys((*_BEFORE, *_AFTER), _nothing))
            found.append(copied)
        return found


def may_change_steps(callback: Any) -> bool:
    """Whether a callback of the user's has hooks of a step."""
    kind = type(callback).__module__
    if kind.startswith((*_LIGHTNINGS, "trainkit.")):
        return False
    return any(has_own(callback, hook) for hook in OF_A_STEP)


def _matters(callback: Any, plan: Plan) -> bool:
    if isinstance(callback, BatchNormGuard):
        if callback.policy == "exact":
            return plan.has_driver
        return callback.policy in ("freeze", "group_norm")
    return may_change_steps(callback)


class _Now:
    """The rows of the micro-batch under way, by their numbers in the big batch."""

    def __init__(self, rows: Sequence[Sequence[int]]) -> None:
        self._all, self.at, self.trainer = rows, 0, None

    def rows(self) -> tuple[Any, Sequence[int]] | None:
        rows, windows = self._all[self.at], None
        if self.trainer is not None:
            windows = windows_of(self.trainer)
        part = None if windows is None else windows.micro_batch_now
        if part is None:
            return self.at, rows
        number, within = part
        return (self.at, number), [rows[place] for place in within]


class _Batches:
    """Yields batches, and is like the run's loader otherwise."""

    _NOT_LENT = ("sampler", "batch_sampler", "state_dict", "load_state_dict")

    def __init__(
        self, batches: Sequence[Any], rows: Any, now: _Now, loader: Any
    ) -> None:
        self._batches, self._now, self._loader = batches, now, loader
        self.batch_size = len(rows[0])

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self._batches):
            self._now.at = number
            yield batch

    def __len__(self) -> int:
        return len(self._batches)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in self._NOT_LENT:
            raise AttributeError(name)
        return getattr(self._loader, name)


class _Taker(Callback):
    """Takes the gradients in place of the optimizers' steps, and ends the rehearsal."""

    def __init__(self, taken: Taken, now: _Now, num_batches: int, plan: Plan) -> None:
        self._taken, self._now = taken, now
        self._num_batches, self._plan = num_batches, plan
        self._names: dict[int, str] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._now.trainer = trainer
        windows = windows_of(trainer)
        for each in windows.accumulators.values() if windows is not None else ():
            if not all(isinstance(s, Uniform) for s in each.strategies.values()):
                each.division.restore(torch.tensor(NO_WEIGHT), None)
        if windows is not None and windows.inside is not None:
            windows.inside.around_chunks(self._taken.draws.of_chunk)
        self._names = {id(p): name for name, p in pl_module.named_parameters()}
        for number, optimizer in enumerate(map(unwrapped, trainer.optimizers)):
            ends = pl_module.automatic_optimization
            optimizer.step = partial(self._take, number, optimizer, ends)
        if self._plan.as_whole:
            vars(pl_module)["training_step"] = _as_whole(pl_module)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        self._taken.losses.append(float(loss.detach()))

    def _take(
        self, number: int, optimizer: Any, ends: bool, closure: Any = None
    ) -> None:
        if closure is not None:
            with torch.enable_grad():
                closure()
        taken = self._taken
        for group in optimizer.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    name = self._names.get(id(each), "a parameter of no module")
                    gradient = each.grad.detach()
                    if gradient.layout is not torch.strided:
                        gradient = gradient.to_dense()
                    gradient = gradient if ends else gradient.clone()
                    taken.gradients[number, taken.num_calls, name] = gradient
        taken.num_calls += 1
        if ends:
            raise Ended

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx + 1 < self._num_batches:
            return
        if not self._taken.num_calls:  # by hand, and nobody has stepped yet
            windows = windows_of(trainer)
            for number, optimizer in enumerate(map(unwrapped, trainer.optimizers)):
                if windows is not None and windows.accumulators[number].is_open:
                    windows.close(trainer, number)
                self._take(number, optimizer, False)
        raise Ended

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        raise Ended


class _AsWhole:
    """A Trainer with the numbers that it has for the big batch."""

    accumulate_grad_batches = num_training_batches = 1

    def __init__(self, trainer: Any) -> None:
        self._own = trainer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


def _as_whole(module: Any) -> Callable[..., Any]:
    """A `training_step` that finds the numbers of the big batch."""
    step, trainer = module.training_step, module._trainer

    @functools.wraps(step)
    def run(batch: Any, *args: Any, **kwargs: Any) -> Any:
        args = tuple(0 if type(each) is int else each for each in args)
        numbers = {"batch_idx": 0} if "batch_idx" in kwargs else {}
        module._trainer = _AsWhole(trainer)
        try:
            return step(batch, *args, **{**kwargs, **numbers})
        finally:
            module._trainer = trainer

    return run


class _Alone(nn.SyncBatchNorm):
    """A layer whose other ranks do not rehearse with it."""

    forward = nn.modules.batchnorm._BatchNorm.forward


def _own_batch(batch: Any, dtype: torch.dtype) -> Any:
    """A batch that a step may write into, in float64 if that is rehearsed."""
    with contextlib.suppress(Exception):  # it may hold what cannot be copied
        batch = copy.deepcopy(batch)
    if dtype is not torch.float64:
        return batch
    return with_tensors(batch, lambda x: x.to(dtype) if x.is_floating_point() else x)


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _no_callbacks() -> list[Any]:
    """A `configure_callbacks` to which a mixin adds its own."""
    return []


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Nobody hears what a copy says."""
    loggers = [logging.getLogger(name) for name in _LIGHTNINGS]
    levels = [each.level for each in loggers]
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        for each in loggers:
            each.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for each, level in zip(loggers, levels, strict=True):
                each.setLevel(level)


@contextlib.contextmanager
def _full_precision(dtype: torch.dtype) -> Iterator[None]:
    precision = torch.get_float32_matmul_precision()
    own = torch.get_default_dtype()
    try:
        # In a backward pass, too, where forward passes run again.
        torch.set_default_dtype(dtype)
        torch.set_float32_matmul_precision("highest")
        with (
            torch.compiler.set_stance("force_eager"),
            torch.backends.cudnn.flags(allow_tf32=False),
        ):
            yield
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.set_default_dtype(own)


def _norm(tensors: Sequence[Tensor]) -> float:
    if not tensors:
        return 0.0
    norms = [torch.linalg.vector_norm(each).double().cpu() for each in tensors]
    return float(torch.linalg.vector_norm(torch.stack(norms)))
