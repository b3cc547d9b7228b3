"""Exact BatchNorm for any loop: a forward whose layers see the whole batch."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from trainkit.core._compat import transform, uncompiled
from trainkit.core.batch_norm.layers import listed
from trainkit.core.generators import States
from trainkit.core.inside.cut import Cut, InPlaceOf, Node, check_cut
from trainkit.core.inside.moment import Surroundings, attributes_of
from trainkit.core.inside.refusals import LAZY, refuse_parts
from trainkit.core.inside.rows import Sizes
from trainkit.core.nested import tensors, with_tensors
from trainkit.core.out_of_memory import in_smaller_parts
from trainkit.core.ranks import Ranks, find_ranks
from trainkit.core.tape.call import Tape
from trainkit.core.tape.check import check, few_rows
from trainkit.core.tape.functions import is_recording, recording
from trainkit.core.tape.operations import Store
from trainkit.core.tape.recorder import Recorder
from trainkit.core.tape.rows import Layout, NumberOfRows
from trainkit.errors import TrainkitError


class TapedForward(Cut):
    """A module's forward, in chunks of rows that meet at its BatchNorm layers.

    Args:
        module: whose forward is replaced.
        sizes: how many rows a chunk may have.
        ranks: that share the statistics.
        name: of the module, for messages; default: its type's.
    """

    def __init__(
        self, module: nn.Module, sizes: Sizes, ranks: Ranks, name: str = ""
    ) -> None:
        super().__init__(module, name or type(module).__name__, sizes)
        self.ranks, self._num_calls = ranks, 0

    def __getstate__(self) -> dict[str, Any]:
        """A copy shares statistics with no other rank."""
        return {**super().__getstate__(), "ranks": Ranks()}

    @uncompiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_recording() or not self.trains:
            return self.original(*args, **kwargs)
        rows = next((len(x) for x in tensors((args, kwargs)) if x.ndim), 0)
        self.most_rows = max(self.most_rows, rows)
        if not rows or self.ranks.size == 1 and rows <= (self.sizes.limit or 0):
            return self.original(*args, **kwargs)
        self.was_cut = True
        if transform() is not None:
            raise TrainkitError(
                f"{self.name}: exact BatchNorm cannot run in a transform of "
                f"torch.func. Use loss.backward()."
            )
        refuse_parts(self.module, self.name, OF_TAPES)
        begun = States({x.device for x in tensors((args, kwargs))})
        return in_smaller_parts(
            lambda: self._run((args, kwargs), rows),
            lambda: self.ranks.size == 1 and self.sizes.halve(rows),
            begun.put_back,
        )

    def _run(self, given: Any, rows: int) -> Any:
        size = self.sizes.limit or rows
        if rows > size and few_rows(rows, size) > 1:
            self._num_calls += 1
            if not self._num_calls & (self._num_calls - 1):
                check(self, given, size)
        _, _, result = self.record(given, rows, size, self.ranks)
        return result()

    def record(
        self, given: Any, rows: int, size: int, ranks: Ranks
    ) -> tuple[Tape, list[Tensor], Callable[[], Any]]:
        """Run the forward for all rows, in chunks of at most so many: its tape, the
        tensors that it has made, and what gives what the call returns."""
        layout = Layout(rows, size)
        device = next(x for x in tensors(given) if x.ndim).device
        store = Store(len(layout.sizes), device)
        tape = Tape(self.name, layout, store, Surroundings([device]))
        recorder = Recorder(tape, ranks)
        args, kwargs = with_tensors(given, recorder.given)
        with recording(recorder):
            _, leaves, build = self.run(args, kwargs, has_cache=True)
        layout.is_over = True
        del args, kwargs
        slots = [recorder.values.slot_of(each) for each in leaves]
        self._refuse_held(recorder, {each for each in slots if each is not None})
        tape.outputs = {
            slot: self._row_dim(recorder, slot)
            for slot in slots
            if slot is not None and slot >= len(recorder.cut)
        }
        outputs = recorder.outputs()
        tape.tidy()
        inputs = recorder.cut

        def result() -> Any:
            found = outputs
            if any(tape.differentiable):
                # torch refuses what was changed since.
                saved = [*inputs, *tape.fixed]
                of = outputs, tape.differentiable, saved, *inputs, *tape.shared
                with torch.enable_grad():  # the forward may have set it
                    found = Node.apply(tape, *of)
            made = zip(tape.outputs, found, strict=True)
            whole = {**dict(enumerate(inputs)), **dict(made)}
            pairs = zip(slots, leaves, strict=True)
            parts = [each if slot is None else whole[slot] for slot, each in pairs]
            return build(x.whole if type(x) is NumberOfRows else x for x in parts)

        return tape, outputs, result

    def _row_dim(self, recorder: Recorder, slot: int) -> int:
        dim = recorder.values.dims[slot]
        if isinstance(dim, str):
            shape = list(recorder.values.held()[slot].shape)
            raise TrainkitError(
                f"exact BatchNorm: {self.name} runs in chunks of rows, and it returns "
                f"a tensor of shape {shape}, which is one for all rows of a chunk. "
                f"Return a value for each row, and take the mean or sum outside."
            )
        return dim

    def _refuse_held(self, recorder: Recorder, known: set[int]) -> None:
        """Refuse values that something keeps, which are those of one chunk."""
        if recorder.values.held().keys() <= known:
            return
        gc.collect()
        held = recorder.values.held()
        for slot in held.keys() - known:
            held_by = attributes_of(self.module).items()
            where = [name for name, value in held_by if value is held[slot]]
            raise TrainkitError(
                f"exact BatchNorm: {self.name} runs in chunks of rows, and "
                f"{listed(where) or 'something outside'} keeps a tensor of shape "
                f"{list(held[slot].shape)} of its forward, which is one chunk's. "
                f"Return it as an output."
            )


OF_TAPES: dict[str, Callable[[str, Any], Any]] = {
    "has sharded weights, so that exact BatchNorm cannot run. Use DDP": (
        lambda path, each: isinstance(each, FSDPModule)
    ),
    **LAZY,
    "is scripted or compiled, and exact BatchNorm writes down what a forward does. "
    "Give the plain one": lambda path, each: (
        isinstance(each, torch.jit.ScriptModule) or hasattr(each, "_orig_mod")
    ),
    "has backward hooks, which would see one chunk of exact BatchNorm": (
        lambda path, each: path and (each._backward_hooks or each._backward_pre_hooks)
    ),
}
"""What exact BatchNorm refuses: operations that cannot be written down, or repeated."""


def warn_of_memory(name: str, memory: Any) -> None:
    """Say that an option of earlier versions does nothing."""
    if memory is not None:
        warnings.warn(
            f"{name}: memory= has no effect any more, and goes with the next release: "
            f"a call takes the memory of one chunk. Leave memory= out.",
            stacklevel=3,
        )


def exact_batch_norm(
    module: nn.Module, *, size: int, process_group: Any = None, memory: Any = None
) -> InPlaceOf:
    """Let the BatchNorm layers of a module see the whole batch, in any loop.

    The module runs in chunks of rows. Each layer is normalised by the mean and variance
    of all rows, on all ranks; its running statistics move once; the gradient is the big
    batch's.

        net = exact_batch_norm(net, size=8)
        loss = any_loss(net(batch), labels)
        loss.backward()

    The forward of the module runs once, on the first chunk, and the others repeat its
    operations: so it may see of a value no more than its shape, type and device. What
    cannot be repeated is refused. Layers in evaluation mode stay as they are; a
    SyncBatchNorm keeps its group. `remove`, or the end of a `with` block, gives the
    module its own forward back.

    What is returned can be called in the module's place, and has its parameters under
    their own names.

    Args:
        module: which holds the layers.
        size: the most rows in a chunk.
        process_group: of the ranks that share a batch; default: all.
        memory: has no effect any more.
    """
    warn_of_memory("exact_batch_norm", memory)
    check_cut("exact_batch_norm", module, size)
    ranks = find_ranks(None, "none", process_group)
    return InPlaceOf(module, TapedForward(module, Sizes(size), ranks))
