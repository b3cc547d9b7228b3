"""Whether a model sees its padding is measured once, in the first window that has some.

Nobody can read from a module whether what it computes depends on columns that only pad:
a convolution does, and a mean over all columns, and BatchNorm over them.
"""

from __future__ import annotations

import copy
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.modules.batchnorm import _BatchNorm

from trainkit.core.out_of_memory import is_out_of_memory, release
from trainkit.core.split.cutting import Cutter, MicroBatch
from trainkit.lit.split.snapshot import Snapshot

Run = Callable[[MicroBatch], list[Tensor]]
"""The terms of a micro-batch's loss, none for None; keeps nothing else of it."""

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
"""By how much of itself a loss may differ by rounding; narrower dtypes: `NARROW`."""

NARROW = 2e-2

MOST_TRIES = 8
"""So often memory may run out in windows whose size is being found."""

MOST_FROZEN = 2**28
"""Bytes of frozen parameters that are kept, in case `training_step` moves them."""


class Found(NamedTuple):
    """What has been measured.

    Attributes:
        whole: the losses as the loader padded the rows.
        trimmed: those without the columns that are padding in all of them.
        differs: whether these are not the same.
        unmeasured: why nothing can be said.
    """

    whole: Sequence[Tensor] = ()
    trimmed: Sequence[Tensor] = ()
    differs: bool = False
    unmeasured: str = ""


class TrimCheck:
    """Compares a micro-batch's loss, trimmed and not, in the first window with padding.

    Without gradients, in full precision and without dropout; BatchNorm stays as it is
    in training. All that `training_step` changes is put back.

    Args:
        pl_module: what trains.
        most: where forward passes communicate, the largest of what the ranks say: they
            run it together. None where each rank may run it by itself.
        may_retry: whether a window in which memory runs out is run again.
    """

    def __init__(
        self, pl_module: Any, most: Callable[[int], int] | None, *, may_retry: bool
    ) -> None:
        self._module = pl_module
        self._most = most
        self._num_tries = MOST_TRIES if may_retry else 1
        self._is_done = False

    def refuses(
        self, cutter: Cutter, batch: Any, cut: Sequence[MicroBatch], run: Run
    ) -> bool:
        """Whether a loader batch must be cut again without trimming.

        Args:
            cutter: has cut it; if the model sees padding, it is told to trim no more.
            batch: the loader batch.
            cut: its micro-batches.
            run: runs one.
        """
        if self._is_done or not cut:
            return False
        most = max(cut, key=lambda micro_batch: micro_batch.trimmed)
        if not self._anywhere(most.trimmed > 0):
            return False
        self._is_done = True
        if self._is_sharded_whole():
            rank_zero_info(
                "MicroBatching: under FSDP it is not measured whether the model sees "
                "its padding. If it does (a convolution, a mean over all columns), say "
                "trim=False."
            )
            return False
        found = self._measured(cutter, batch, most, max(m.padded for m in cut), run)
        if found.unmeasured:
            _announce_unmeasured(found.unmeasured)
        if not self._is_done:
            return True  # exact in any case, until it can be said
        if not self._anywhere(found.differs):
            return False
        cutter.stop_trimming()
        if found.differs:
            _announce(found)
        return True

    def _anywhere(self, here: bool) -> bool:
        return here if self._most is None else self._most(int(here)) > 0

    def _is_sharded_whole(self) -> bool:
        """Whether only FSDP's own wrapper may run it."""
        kinds = FullyShardedDataParallel
        model = self._module.trainer.strategy.model
        return isinstance(model, kinds) or any(
            isinstance(module, kinds) for module in self._module.modules()
        )

    def _measured(
        self, cutter: Cutter, batch: Any, part: MicroBatch, room: int, run: Run
    ) -> Found:
        """The losses of some of a micro-batch's rows: no more than fit untrimmed into
        what the largest micro-batch needs."""
        wide = (part.padded + part.trimmed) // len(part.rows)
        rows = part.rows[: max(2, room // max(wide, 1))]
        trimmed, whole = (
            MicroBatch(each, rows, 0, 0) for each in cutter.pair(batch, rows)
        )
        with _kept(self._module) as put_back:

            def losses(micro_batch: MicroBatch) -> list[Tensor]:
                put_back()
                return run(copy.deepcopy(micro_batch))  # it may be written into

            def drawn_anew(micro_batch: MicroBatch) -> list[Tensor]:
                put_back()
                state = Snapshot(self._module, random=False)
                run(copy.deepcopy(micro_batch))
                state.restore()
                return run(copy.deepcopy(micro_batch))

            for gradients in (torch.no_grad, torch.enable_grad):
                with gradients():
                    try:
                        short = losses(trimmed)
                    except Exception as error:
                        _free(error)
                        continue  # some steps take gradients themselves
                    try:
                        long = losses(whole)
                        if self._are_same(long, short):
                            return Found()
                        if self._are_same(drawn_anew(trimmed), short):
                            return Found(long, short, differs=True)
                        return Found(unmeasured="its loss is drawn at random")
                    except Exception as error:
                        return self._failed(error)
        # The window itself will raise it, and may be run again.
        self._is_done = self._most is not None or not self._num_tries
        return Found()

    def _failed(self, error: Exception) -> Found:
        """Memory may run out where a size is being found: then in the next window."""
        text = f"{type(error).__name__}: {error}"
        self._num_tries -= 1
        if self._num_tries and self._most is None and is_out_of_memory(error):
            self._is_done, text = False, ""
        _free(error)
        return Found(unmeasured=text)

    def _are_same(self, losses: list[Tensor], others: list[Tensor]) -> bool:
        dtypes = {p.dtype for p in self._module.parameters() if p.is_floating_point()}
        return len(losses) == len(others) and all(
            math.isclose(
                a.item(),
                b.item(),
                rel_tol=max(TOLERANCES.get(d, NARROW) for d in {*dtypes, a.dtype}),
            )
            or (a.isnan() and b.isnan())
            for a, b in zip(losses, others, strict=True)
        )


@contextmanager
def _kept(pl_module: Any) -> Iterator[Callable[[], None]]:
    """The module without dropout and in full precision; yields what puts back all that
    a training step changes."""
    snapshot = Snapshot(pl_module)
    frozen = [p for p in pl_module.parameters() if not p.requires_grad]
    if sum(p.numel() * p.element_size() for p in frozen) > MOST_FROZEN:
        frozen = []
    values = [p.detach().clone() for p in frozen]
    modes = [(module, module.training) for module in pl_module.modules()]

    def put_back() -> None:
        snapshot.restore()
        with torch.no_grad():
            for parameter, value in zip(frozen, values, strict=True):
                if not torch.equal(parameter, value):
                    parameter.copy_(value)
        for module, was_training in modes:
            module.training = was_training and isinstance(module, _BatchNorm)

    has_fast_path = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)  # eval mode must not change it
        with _uncompiled(), _full_precision(pl_module.device.type):
            yield put_back
    finally:
        torch.backends.mha.set_fastpath_enabled(has_fast_path)
        put_back()
        for module, was_training in modes:
            module.training = was_training


def _full_precision(kind: str) -> Any:
    if not torch.is_autocast_enabled(kind):
        return nullcontext()
    return torch.autocast(kind, enabled=False)


def _uncompiled() -> Any:
    """What is compiled runs as it is: it would be compiled again for other shapes."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


def _free(error: Exception) -> None:
    if is_out_of_memory(error):
        release(error)


def _announce(found: Found) -> None:
    whole, trimmed = (
        " and ".join(f"{loss.item():.8g}" for loss in losses) or "None"
        for losses in (found.whole, found.trimmed)
    )
    warnings.warn(
        f"MicroBatching: the model sees its padding. The loss of some rows is {whole} "
        f"as the loader padded them, and {trimmed} without the columns that are "
        f"padding in all of them. So nothing is trimmed from here on: every "
        f"micro-batch gets all columns, as the whole batch has them. Convolutions, "
        f"means over all columns, BatchNorm over them and attention without a mask see "
        f"padding; with a mask in these, trimming would be exact and save its cost. "
        f"trim=False says so beforehand.",
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
