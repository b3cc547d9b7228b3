"""The forward of a module whose BatchNorm layers see the whole batch."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from trainkit.core._compat import is_transformed, uncompiled
from trainkit.core.batch_norm.layers import listed
from trainkit.core.inside.chunks import Sizes
from trainkit.core.inside.cut import Around, nothing_around
from trainkit.core.inside.moment import States
from trainkit.core.nested import take_apart, tensors, with_tensors
from trainkit.core.out_of_memory import is_out_of_memory, release
from trainkit.core.ranks import Ranks
from trainkit.core.tape.call import Tape, Taped
from trainkit.core.tape.functions import is_recording, recording
from trainkit.core.tape.operations import Surroundings
from trainkit.core.tape.recorder import Recorder
from trainkit.core.tape.rows import Layout, NumberOfRows
from trainkit.core.tape.store import Store, transport_to
from trainkit.errors import TrainkitError


class TapedForward:
    """A module's forward, in chunks of rows; it stands on the instance.

    It is an object, not a function: a copy of the module then has a copy of it, which
    runs the copy, and both can be pickled.

    Args:
        module: whose forward is replaced.
        sizes: how many rows a chunk may have.
        ranks: that share the statistics.
        name: of the module, for messages; default: its type's.

    Attributes:
        around: makes the context in which the first chunk runs, of nothing here.
        was_called: whether the module was called in training.
        was_cut: whether rows of such a call were run in chunks.
        most_rows: of a call.
    """

    def __init__(
        self, module: nn.Module, sizes: Sizes, ranks: Ranks, name: str = ""
    ) -> None:
        self.module, self.name = module, name or type(module).__name__
        self.sizes, self.ranks, self._num_calls = sizes, ranks, 0
        self.around: Around = nothing_around
        self.was_called = self.was_cut = False
        self.most_rows = 0
        self._before = vars(module).get("forward")

    def install(self) -> None:
        """Take the place of the module's forward."""
        vars(self.module)["forward"] = self

    def remove(self) -> None:
        """Give the module its own forward back."""
        if vars(self.module).get("forward") is self:
            del vars(self.module)["forward"]
            if self._before is not None:
                vars(self.module)["forward"] = self._before

    def __getstate__(self) -> dict[str, Any]:
        """A copy shares statistics with no other rank."""
        return {**vars(self), "ranks": Ranks()}

    @uncompiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        original = self._before or type(self.module).forward.__get__(self.module)
        trains = self.module.training or torch.is_grad_enabled()
        if is_recording() or not trains:
            return original(*args, **kwargs)
        rows = next((len(x) for x in tensors((args, kwargs)) if x.ndim), 0)
        self.was_called, self.most_rows = True, max(self.most_rows, rows)
        if not rows or self.ranks.size == 1 and rows <= (self.sizes.limit or 0):
            return original(*args, **kwargs)
        self.was_cut = True
        _refuse_module(self.module, self.name)
        self._num_calls += 1
        begun = States({x.device for x in tensors((args, kwargs))})
        while True:
            try:
                return self._run(original, (args, kwargs), rows)
            except Exception as error:
                is_alone = self.ranks.size == 1 and is_out_of_memory(error)
                if not (is_alone and self.sizes.halve(rows)):
                    raise
                release(error)
                begun.put_back()

    def _run(self, original: Any, arguments: Any, rows: int) -> Any:
        layout = Layout(rows, self.sizes.limit or rows)
        device = next(x for x in tensors(arguments) if x.ndim).device
        store = Store(len(layout.sizes), transport_to(device))
        tape = Tape(layout, store, Surroundings(device))
        is_checked = not self._num_calls & (self._num_calls - 1)
        recorder = Recorder(self.name, tape, self.ranks, is_checked=is_checked)
        args, kwargs = with_tensors(arguments, recorder.given)
        cut = recorder.cut
        with self.around(None, None), recording(recorder, is_checked=is_checked):
            found = original(*args, **kwargs)
        layout.is_over = True
        del args, kwargs
        fields, build = take_apart(found)
        leaves = [each.value for each in fields]
        del found, fields
        slots = [recorder.values.slot_of(each) for each in leaves]
        self._refuse_held(recorder, {each for each in slots if each is not None})
        tape.outputs = {
            slot: self._row_dim(recorder, slot)
            for slot in slots
            if slot is not None and slot >= len(cut)
        }
        outputs = recorder.outputs()
        del recorder
        tape.tidy()
        if not tape.trains.isdisjoint(tape.outputs):
            with torch.enable_grad():  # the forward may have set it
                outputs = list(Taped.apply(tape, outputs, *cut, *tape.shared))  # type: ignore[call-overload]
        results = dict(enumerate(cut)) | dict(zip(tape.outputs, outputs, strict=True))
        pairs = zip(slots, leaves, strict=True)
        whole = [each if slot is None else results[slot] for slot, each in pairs]
        return build(x.whole if type(x) is NumberOfRows else x for x in whole)

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
            where = [
                f"{path}.{name}".lstrip(".")
                for path, each in self.module.named_modules()
                for name, value in (vars(each) | each._buffers).items()
                if value is held[slot]
            ]
            raise TrainkitError(
                f"exact BatchNorm: {self.name} runs in chunks of rows, and "
                f"{listed(where) or 'something outside'} keeps a tensor of shape "
                f"{list(held[slot].shape)} of its forward, which is one chunk's. "
                f"Return it as an output."
            )


def _refuse_module(module: nn.Module, name: str) -> None:
    """Refuse modules whose operations cannot be written down, or repeated."""
    if is_transformed():
        raise TrainkitError(
            f"{name}: exact BatchNorm cannot run in a transform of torch.func. Use "
            f"loss.backward()."
        )
    reasons: dict[str, Any] = {
        "has sharded weights, so use DDP": lambda each: isinstance(each, FSDPModule),
        "is scripted, so give the plain one": lambda each: isinstance(
            each, torch.jit.ScriptModule
        ),
        "is compiled, so give the plain one": lambda each: hasattr(each, "_orig_mod"),
        "has backward hooks, which would see one chunk": lambda each: (
            each is not module and (each._backward_hooks or each._backward_pre_hooks)
        ),
    }
    for path, each in module.named_modules():
        for why, is_so in reasons.items():
            if is_so(each):
                raise TrainkitError(
                    f"{name}: exact BatchNorm writes down what a forward does, and "
                    f"{path or 'it'} {why}."
                )
