"""A measurement of whether a model sees its padding.

A module does not show whether its result depends on columns that are only padding, as
those of a convolution, of a mean over all columns and of BatchNorm over them do.
"""

from __future__ import annotations

import copy
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm

from trainkit.core.out_of_memory import is_out_of_memory, release
from trainkit.core.split.cutting import Cutter, MicroBatch
from trainkit.lit.rerun.snapshot import Snapshot

Run = Callable[[MicroBatch], list[Tensor]]
"""Returns the terms of a micro-batch's loss, none for None; keeps nothing else."""

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
"""The share of a loss by which rounding may change it; narrower dtypes: `NARROW`."""

NARROW = 2e-2

OF_GRADIENT = 10
"""How many times as large the tolerance of the gradient is, as a share of its size."""

OF_NOTHING = 1e-2
"""A share of the tolerance: by how much a loss close to 0 may differ, as in policy
gradients."""

MOST_TRIES = 8
"""How often memory may run out in windows whose size is being found."""

MOST_FROZEN = 2**28
"""How many bytes of frozen parameters are kept, in case `training_step` moves them."""


class Measured(NamedTuple):
    """One run of a micro-batch.

    Attributes:
        losses: by term.
        slopes: the size of each parameter's gradient; None if none was taken.
    """

    losses: list[Tensor]
    slopes: Tensor | None


class Found(NamedTuple):
    """The result of two runs.

    Attributes:
        whole: the run with the padding of the loader.
        trimmed: the run without the columns that are padding in all rows.
        differs: whether the two differ.
        unmeasured: why there is no result.
        is_open: whether a later window may give one.
        error: the error that `training_step` has raised for the trimmed rows alone.
    """

    whole: Measured | None = None
    trimmed: Measured | None = None
    differs: bool = False
    unmeasured: str = ""
    is_open: bool = False
    error: str = ""


class TrimCheck:
    """Compares a micro-batch's loss and gradient with and without trimming.

    It measures in the first window with padding, and again 1, 2, 4, 8, ... loader
    batches later, since a branch may begin at 0, or be taken from some step on. While a
    layer is still 0, the gradient shows a difference that the loss does not.

    The runs are in full precision and in training mode; without dropout, if the loss is
    random otherwise. Everything that `training_step` changes is put back.

    Args:
        pl_module: the module that trains.
        most: returns the largest of all ranks' numbers; the ranks measure together,
            since forward passes communicate. None: each rank measures by itself.
        may_retry: whether a window in which memory runs out is run again.
    """

    def __init__(
        self, pl_module: Any, most: Callable[[int], int] | None, *, may_retry: bool
    ) -> None:
        self._module = pl_module
        self._most = most
        self._num_tries = MOST_TRIES if may_retry else 1
        self._is_done = False
        self._num_since = self._due = 0  # loader batches, from the first that was run
        self._last = 0
        # FSDP2 brings gradients together in its own backward pass.
        self._takes_slopes = most is None and not any(
            isinstance(p, DTensor) for p in pl_module.parameters()
        )

    def refuses(
        self, cutter: Cutter, batch: Any, cut: Sequence[MicroBatch], run: Run
    ) -> bool:
        """Whether a loader batch must be cut again without trimming.

        Args:
            cutter: has cut it; it stops trimming if the model sees padding.
            batch: the loader batch.
            cut: its micro-batches.
            run: runs one of them.
        """
        if self._is_done or not cut:
            return False
        self._num_since += self._due > 0
        if self._num_since < self._due:
            return False
        most = max(cut, key=lambda micro_batch: micro_batch.trimmed)
        if not self._largest(most.trimmed > 0):
            return False
        if self._is_sharded_whole():
            self._is_done = True
            rank_zero_info(
                "MicroBatching: under FSDP it is not measured whether the model sees "
                "its padding. If it does (a convolution, a mean over all columns), say "
                "trim=False."
            )
            return False
        found = self._measured(cutter, batch, most, max(m.padded for m in cut), run)
        if found.is_open:
            return True  # exact in any case, until there is a result
        if found.unmeasured:
            self._is_done = True
            _announce_unmeasured(found.unmeasured)
        last, self._last = self._last, self._num_since
        self._due = max(1, 2 * self._num_since)
        verdict = self._largest(2 if found.differs else self._is_done)
        self._is_done = verdict > 0
        if verdict < 2:
            return False
        cutter.stop_trimming()
        if found.differs:
            _announce_difference(found, since=self._num_since - last)
        return True

    def _largest(self, here: int) -> int:
        return here if self._most is None else self._most(here)

    def _is_sharded_whole(self) -> bool:
        """Whether only FSDP's own wrapper may run the module."""
        modules = (self._module.trainer.strategy.model, *self._module.modules())
        return any(isinstance(each, FullyShardedDataParallel) for each in modules)

    def _measured(
        self, cutter: Cutter, batch: Any, part: MicroBatch, room: int, run: Run
    ) -> Found:
        """Run some of a micro-batch's rows with and without trimming: as many as fit,
        untrimmed, into the memory of the largest micro-batch."""
        wide = (part.padded + part.trimmed) // len(part.rows)
        rows = part.rows[: max(2, room // max(wide, 1))]
        trimmed, whole = (
            MicroBatch(each, rows, 0, 0) for each in cutter.pair(batch, rows)
        )
        with _kept(self._module) as put_back:
            for trains in (True, False):
                found = self._compared(whole, trimmed, run, partial(put_back, trains))
                if found is not None:
                    return found
        return Found(unmeasured="its loss is drawn at random")

    def _compared(
        self,
        whole: MicroBatch,
        trimmed: MicroBatch,
        run: Run,
        put_back: Callable[[], None],
    ) -> Found | None:
        """The result of two runs; None if they draw other random numbers."""

        def measured(micro_batch: MicroBatch, *, is_anew: bool = False) -> Measured:
            put_back()
            if is_anew:
                state = Snapshot(self._module, generators=False)
                run(copy.deepcopy(micro_batch))
                state.restore()
            losses = run(copy.deepcopy(micro_batch))  # it may be written into
            return Measured(
                [loss.detach() for loss in losses],
                self._slopes(losses) if takes_slopes else None,
            )

        raised = ""
        ways: list[tuple[bool, Any]] = [
            (False, torch.no_grad),
            (False, torch.enable_grad),
        ]
        if self._takes_slopes:
            ways.insert(0, (True, torch.enable_grad))
        for takes_slopes, gradients in ways:
            with gradients():
                try:
                    short = measured(trimmed)
                except Exception as error:
                    is_memory = is_out_of_memory(error)
                    raised = "" if is_memory else f"{type(error).__name__}: {error}"
                    _free(error)
                    continue  # some steps need gradients, some allow none
                try:
                    long = measured(whole)
                    # If forward passes communicate, all ranks must run as many.
                    differs = not self._are_same(long, short)
                    if not self._largest(differs):
                        return Found()
                    anew = measured(trimmed, is_anew=True)
                    if self._largest(not self._are_same(anew, short)):
                        return None
                    return Found(long, short, differs)
                except Exception as error:
                    if takes_slopes:
                        _free(error)
                        continue
                    return self._failed(error)
        return self._unless_both_raise(raised, lambda: measured(whole))

    def _unless_both_raise(self, raised: str, run: Callable[[], Any]) -> Found:
        """The result if the trimmed rows raise an error, as the window will: a
        difference if the untrimmed rows raise none."""
        may_run_again = Found(is_open=self._most is None and self._num_tries > 0)
        if not raised or self._most is not None:
            return may_run_again
        try:
            run()
        except Exception as error:
            _free(error)
            return may_run_again
        return Found(differs=True, error=raised)

    def _slopes(self, losses: list[Tensor]) -> Tensor | None:
        """The size of each parameter's gradient."""
        losses = [loss for loss in losses if loss.requires_grad]
        parameters = [p for p in self._module.parameters() if p.requires_grad]
        if not losses or not parameters:
            return None
        found = torch.autograd.grad(
            torch.stack([loss.sum() for loss in losses]).sum(),
            parameters,
            allow_unused=True,
        )
        zero = torch.zeros((), device=losses[0].device)
        return torch.stack([zero if g is None else _size(g, zero) for g in found]).cpu()

    def _failed(self, error: Exception) -> Found:
        """No result; if memory ran out while a size is being found, the next window
        may give one."""
        text = f"{type(error).__name__}: {error}"
        self._num_tries -= 1
        if self._num_tries and self._most is None and is_out_of_memory(error):
            text = ""
        _free(error)
        return Found(unmeasured=text, is_open=not text)

    def _are_same(self, one: Measured, other: Measured) -> bool:
        dtypes = {p.dtype for p in self._module.parameters() if p.is_floating_point()}
        dtypes.update(loss.dtype for loss in one.losses)
        tolerance = max((TOLERANCES.get(d, NARROW) for d in dtypes), default=NARROW)
        near = partial(math.isclose, rel_tol=tolerance, abs_tol=OF_NOTHING * tolerance)
        return (
            len(one.losses) == len(other.losses)
            and all(
                near(a.item(), b.item()) or a.isnan() or b.isnan()  # stops the run
                for a, b in zip(one.losses, other.losses, strict=True)
            )
            and not _deviation(one, other) > OF_GRADIENT * tolerance
        )


def _size(gradient: Tensor, like: Tensor) -> Tensor:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    dtype = torch.promote_types(values.dtype, torch.float32)
    return torch.linalg.vector_norm(values, dtype=dtype).to(like)


def _deviation(one: Measured, other: Measured) -> float:
    """The least share of their size by which the gradients differ."""
    if one.slopes is None or other.slopes is None:
        return 0.0
    return float((one.slopes - other.slopes).norm() / other.slopes.norm())


@contextmanager
def _kept(pl_module: Any) -> Iterator[Callable[[bool], None]]:
    """Set the module to full precision. Yields a function that puts back everything a
    training step changes; its argument is whether to train with dropout and the like.
    """
    snapshot = Snapshot(pl_module, device=pl_module.device)
    frozen = [p for p in pl_module.parameters() if not p.requires_grad]
    if sum(p.numel() * p.element_size() for p in frozen) > MOST_FROZEN:
        frozen = []
    values = [p.detach().clone() for p in frozen]
    modes = [(module, module.training) for module in pl_module.modules()]

    def put_back(trains: bool) -> None:
        snapshot.restore()
        with torch.no_grad():
            for parameter, value in zip(frozen, values, strict=True):
                if not torch.equal(parameter, value):
                    parameter.copy_(value)
        for module, was_training in modes:
            module.training = was_training and (
                trains or isinstance(module, _BatchNorm)
            )

    kind = pl_module.device.type
    has_fast_path = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)  # eval mode must not change it
        with ExitStack() as stack:
            if "torch._dynamo" in sys.modules:  # other shapes would compile again
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
            yield put_back
    finally:
        torch.backends.mha.set_fastpath_enabled(has_fast_path)
        put_back(True)


def _free(error: Exception) -> None:
    if is_out_of_memory(error):
        release(error)


def _announce_difference(found: Found, *, since: int) -> None:
    seen = (
        f"Without the columns that are padding in all of some rows, training_step "
        f"raises {found.error}"
    )
    if found.whole is not None and found.trimmed is not None:
        padded, short = (
            " and ".join(f"{loss.item():.8g}" for loss in each.losses) or "None"
            for each in (found.whole, found.trimmed)
        )
        seen = (
            f"The loss of some rows is {padded} as the loader padded them, and {short} "
            f"without the columns that are padding in all of them"
        )
        if deviation := _deviation(found.whole, found.trimmed):
            seen += f", and its gradient is off by {deviation:.2g} of its size"
    if since:
        ago = "The batch before" if since == 1 else f"{since} batches before"
        seen += f". {ago} there was no difference yet: steps since then may be off"
    warnings.warn(
        f"MicroBatching: the model sees its padding. {seen}. So nothing is trimmed "
        f"from here on: every micro-batch gets all columns of the whole batch. "
        f"Convolutions, means over all columns, BatchNorm over them and attention "
        f"without a mask see padding; with a mask in these, trimming would be exact "
        f"and save its cost. To expect this from the start, say trim=False.",
        stacklevel=2,
    )


def _announce_unmeasured(why: str) -> None:
    warnings.warn(
        f"MicroBatching: it could not be measured whether the model sees its padding, "
        f"by running training_step with and without the columns that only pad: {why}. "
        f"They are left out. If the model sees them (a convolution, a mean over all "
        f"columns), say trim=False.",
        stacklevel=2,
    )
