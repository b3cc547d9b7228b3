"""Rehearsals: one optimizer step of a copy, in a quiet Trainer of its own."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from torch import Tensor, nn

from trainkit.core._compat import alone_among_ranks
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
from trainkit.lit.aside import LIGHTNINGS, logged_from
from trainkit.lit.batch_norm.guard import BatchNormGuard
from trainkit.lit.callback.base import OrderedCallback, no_callbacks, windows_of
from trainkit.lit.proof.copying import Copies, move_weights, refuse_gradients
from trainkit.lit.proof.draws import SEED, Draws, Noted, WritesShared
from trainkit.lit.proof.report import NotMeasured
from trainkit.lit.proof.taken import Taken

MOST_WIDE = 2**27
"""With more parameters, none are copied to float64, which takes 1 GiB of these."""

NOT_AGAIN = (
    "prepare_data", "setup", "configure_model", "on_fit_start", "on_train_start",
    "on_train_epoch_start", "on_sanity_check_start", "on_sanity_check_end",
    "on_train_epoch_end", "on_train_end", "on_fit_end", "on_exception", "teardown",
)  # fmt: skip
"""Hooks that do not run again on a copy."""

OF_A_STEP = (
    "on_train_batch_start", "on_train_batch_end", "on_before_zero_grad",
    "on_before_backward", "on_after_backward", "on_before_optimizer_step",
)  # fmt: skip

NO_WEIGHT = 0.25
"""What the losses of a rehearsed window are divided by first: no rows weigh so much, so
that a hook which looks at a gradient before the window is complete shows."""


class Ended(BaseException):
    """Ends a rehearsal; no code that catches errors catches it."""


@dataclass(eq=False)
class Rehearsal:
    """How steps of a module in `fit` are rehearsed, on copies of it.

    Attributes:
        trainer: to which the module is attached.
        module: of which copies run.
        driver: the callback that divides the run's windows.
        dtype: of the arithmetic; float64 where the module has it.
        callbacks: the run's; default: the Trainer's.
        without: hooks of the module, and names of callbacks, that are taken away.
        changes: what else is done to the copy before it runs, one after another.
        shares: whether large frozen parameters are shared with the copy.
        ignored: the label by which rows were made to end earlier, if they were.
        noted: what the first of all rehearsals has drawn, by its number.
    """

    trainer: Any
    module: Any
    driver: Any
    dtype: torch.dtype = torch.float32
    callbacks: Sequence[Any] | None = None
    without: frozenset[str] = frozenset()
    changes: tuple[Callable[[Any], Any], ...] = ()
    shares: bool = True
    ignored: int | None = None
    noted: dict[int, Noted] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.callbacks is None:
            self.callbacks = self.trainer.callbacks
        parameters = list(self.module.parameters())
        if any(each.dtype is torch.float64 for each in parameters):
            self.dtype = torch.float64
        elif self.dtype is torch.float64:
            if sum(each.numel() for each in parameters) > MOST_WIDE:
                raise NotMeasured("too many parameters to copy in float64")

    def run(
        self,
        batches: Sequence[Any],
        rows: Sequence[Sequence[int]],
        *,
        strategies: AccumulationStrategy | Strategies | None = None,
        options: MicroBatching | None = None,
        seed: int = SEED,
    ) -> Taken:
        """The gradients of one step over some batches, with which it would end.

        Args:
            batches: loader batches of one window, as the loader would yield them.
            rows: the rows in each, by their numbers in the big batch.
            strategies: what a micro-batch weighs, if trainkit takes part.
            options: how loader batches are cut, if they are.
            seed: of what draws unseen.
        """
        try:
            return self._run(batches, rows, strategies, options, seed)
        except WritesShared:
            self.shares = False
            return self._run(batches, rows, strategies, options, seed)

    def _run(
        self,
        batches: Sequence[Any],
        rows: Any,
        strategies: Any,
        options: Any,
        seed: int,
    ) -> Taken:
        live, has_driver = windows_of(self.trainer), bool(strategies or options)
        with contextlib.nullcontext() if live is None else live.bare():
            how = {"shares": self.shares, "dtype": self.dtype}
            copies = Copies(self.trainer, self.module, **how)
            callbacks = self._callbacks(copies, has_driver=has_driver)
        module = copies.module
        self._prepare(module)
        move_weights(module, copies.shared)
        own = [_own_batch(each, self.dtype) for each in batches]
        loader = _Batches(own, rows, self.trainer.train_dataloader)
        of = loader.rows_now, self.dtype, copies.shared, self.noted
        draws = Draws(*of, ignored=self.ignored)
        draws.turn_off(module)
        taken = Taken(draws)
        if has_driver:
            own = self.driver.for_copy(module, strategies, options)
            callbacks += [] if own is None else [own]
        has_window = has_driver or module.automatic_optimization
        trainer = quiet_trainer(
            self.trainer,
            callbacks=[*callbacks, _Taker(taken, loader)],
            precision="64-true" if self.dtype is torch.float64 else "32-true",
            accumulate_grad_batches=len(batches) if has_window else 1,
        )
        stand_where(trainer, self.trainer)
        vars(trainer)["save_checkpoint"] = _nothing  # callbacks of the user's may
        if seed != SEED:
            copies.move_generators()
        for change in self.changes:
            taken.result = change(module)
        kept = random_kept(self.trainer.strategy.root_device)
        live_stays = refuse_gradients(self.module)
        with kept, live_stays, alone_among_ranks(), _aside(self.dtype), draws:
            seed_all(seed)
            with contextlib.suppress(Ended):
                trainer.fit(module, **self._data(loader))
        if not taken.num_calls:
            raise NotMeasured("the optimizer took no step after these rows")
        return taken

    def _prepare(self, module: Any) -> None:
        """Let a copy be what a step needs, and no more."""
        own = vars(module)
        own["configure_callbacks"] = no_callbacks
        own.update(dict.fromkeys({*NOT_AGAIN} & {*dir(module)}, _nothing))
        self._take_away(module, LightningModule)
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

    def _take_away(self, owner: Any, base: type) -> None:
        """Let hooks be those of Lightning."""
        for name in self.without:
            if hasattr(base, name):
                vars(owner)[name] = MethodType(getattr(base, name), owner)

    def _data(self, loader: Any) -> dict[str, Any]:
        """What a quiet Trainer trains on: the data module's hooks stay."""
        live = self.trainer.datamodule
        if live is None:
            return {"train_dataloaders": loader}
        data = copy.copy(live)
        names = (*NOT_AGAIN, "state_dict", "load_state_dict")
        vars(data).update(dict.fromkeys(names, _nothing))
        self._take_away(data, LightningDataModule)
        vars(data)["train_dataloader"] = lambda: loader
        return {"datamodule": data}

    def _callbacks(self, copies: Copies, *, has_driver: bool) -> list[Any]:
        """Copies of the callbacks that may change a step."""
        found = []
        for each in self.callbacks or ():
            name = type(each).__name__
            if name not in self.without and _matters(each, has_driver=has_driver):
                copied = copies.of(each, name)
                if not isinstance(copied, OrderedCallback):
                    vars(copied).update(dict.fromkeys(NOT_AGAIN, _nothing))
                found.append(copied)
        return found


def may_change_steps(callback: Any) -> bool:
    """Whether a callback of the user's has hooks of a step."""
    given = vars(callback)  # as LambdaCallback keeps functions of the user's
    if type(callback).__module__.startswith((*LIGHTNINGS, "trainkit.")):
        # At a batch's start and end they mostly collect numbers: into the user's list,
        # which has no copy.
        return any(hook in given for hook in OF_A_STEP[2:])
    return any(has_own(callback, hook) for hook in OF_A_STEP)


def _matters(callback: Any, *, has_driver: bool) -> bool:
    if not isinstance(callback, BatchNormGuard):
        return may_change_steps(callback)
    policy = callback.policy
    return has_driver if policy == "exact" else policy in ("freeze", "group_norm")


def refuse_backend(trainer: Any) -> None:
    """Refuse modules that no single device can run as they are."""
    kinds = {cls.__name__ for cls in type(trainer.strategy).__mro__}
    if not kinds & {"SingleDeviceStrategy", "DDPStrategy"}:
        raise NotMeasured(
            f"{type(trainer.strategy).__name__} spreads the module over ranks; check "
            f"with one device: Trainer(devices=1, strategy='auto')"
        )


class _Batches:
    """Yields batches, and is like the run's loader otherwise.

    Args:
        batches: of one window.
        rows: the rows in each, by their numbers in the big batch.
        loader: the run's.
    """

    _NOT_LENT = ("sampler", "batch_sampler", "state_dict", "load_state_dict")

    def __init__(self, batches: Sequence[Any], rows: Any, loader: Any) -> None:
        self._batches, self._rows, self._loader = batches, rows, loader
        self._at, self.trainer, self.batch_size = 0, None, len(rows[0])

    def rows_now(self) -> tuple[Any, Sequence[int]]:
        """The micro-batch under way, and its rows."""
        rows = self._rows[self._at]
        windows = None if self.trainer is None else windows_of(self.trainer)
        driver = None if windows is None else windows.driver
        part = None if driver is None else driver.rows_now
        if part is None:
            return self._at, rows
        number, within = part
        if windows is not None and windows.is_split:  # its rows are the window's
            rows = [row for each in self._rows for row in each]
        return (self._at, number), [rows[place] for place in within]

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self._batches):
            self._at = number
            yield batch

    def __len__(self) -> int:
        return len(self._batches)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in self._NOT_LENT:
            raise AttributeError(name)
        return getattr(self._loader, name)


class _Taker(Callback):
    """Takes the gradients in place of the optimizers' steps, and ends the rehearsal."""

    def __init__(self, taken: Taken, batches: _Batches) -> None:
        self._taken, self._batches = taken, batches
        self._names: dict[int, str] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._batches.trainer = trainer
        windows = windows_of(trainer)
        for each in windows.accumulators.values() if windows is not None else ():
            if not all(isinstance(s, Uniform) for s in each.strategies.values()):
                each.division.restore(torch.tensor(NO_WEIGHT), None)
        self._names = {id(p): name for name, p in pl_module.named_parameters()}
        for number, optimizer in enumerate(map(unwrapped, trainer.optimizers)):
            ends = pl_module.automatic_optimization
            optimizer.step = partial(self._take, number, optimizer, ends)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        self._taken.losses.append(float(loss.detach()))

    def _take(
        self, number: int, optimizer: Any, ends: bool, closure: Any = None
    ) -> None:
        if closure is not None:
            with torch.enable_grad():
                closure()
        taken = self._taken
        held = [each for group in optimizer.param_groups for each in group["params"]]
        for place, each in enumerate(held):
            if each.grad is not None:
                other = f"parameter {place} of the optimizer, which no module has"
                name = self._names.get(id(each), other)
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
        if batch_idx + 1 < len(self._batches):
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


@contextlib.contextmanager
def _aside(dtype: torch.dtype) -> Iterator[None]:
    """Nobody hears what a copy says, and nothing is rounded more than it must be."""
    precision, own = torch.get_float32_matmul_precision(), torch.get_default_dtype()
    with (
        logged_from(logging.CRITICAL),
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        torch.compiler.set_stance("force_eager"),
        torch.backends.cudnn.flags(allow_tf32=False),
    ):
        warnings.simplefilter("ignore")
        try:
            torch.set_default_dtype(dtype)  # a backward pass may run forward again
            torch.set_float32_matmul_precision("highest")
            yield
        finally:
            torch.set_float32_matmul_precision(precision)
            torch.set_default_dtype(own)
