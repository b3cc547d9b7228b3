"""The forward of a module whose BatchNorm layers see the whole batch."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from trainkit.core._compat import is_transformed, uncompiled
from trainkit.core.batch_norm.layers import listed
from trainkit.core.inside.chunks import Sizes
from trainkit.core.inside.cut import Around, nothing_around
from trainkit.core.inside.moment import States
from trainkit.core.nested import take_apart, tensors
from trainkit.core.out_of_memory import is_out_of_memory, release
from trainkit.core.ranks import Ranks
from trainkit.core.tape.call import Tape, Taped
from trainkit.core.tape.left import left_in
from trainkit.core.tape.recorder import Recorder
from trainkit.core.tape.rows import Layout, NumberOfRows
from trainkit.core.tape.settings import Surroundings
from trainkit.core.tape.store import Store, transport_to
from trainkit.core.tape.turned import refuse_mixing
from trainkit.core.tape.watching import is_recording, recording
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
        rows = next((len(x) for x in tensors((args, kwargs)) if x.ndim), None)
        self.was_called, self.most_rows = True, max(self.most_rows, rows or 0)
        if rows is None or self._is_one(rows):
            return original(*args, **kwargs)
        self.was_cut = True
        self._refuse_module()

        def is_long(path: str, value: Any) -> bool:
            return isinstance(value, list) and len(value) == rows > 1

        fields, build = take_apart((args, kwargs), is_long)
        values = [each.value for each in fields]
        for each in values:
            is_array = hasattr(each, "shape") and not isinstance(each, Tensor)
            if is_long("", each) or (is_array and [*each.shape[:1]] == [rows]):
                raise TrainkitError(
                    f"{self.name}: an argument is a {type(each).__name__} as long as "
                    f"the batch ({rows} rows), and its forward runs once, on the first "
                    f"chunk. Give a tensor."
                )

        def run(given: list[Any]) -> Any:
            positional, named = build(iter(given))
            return original(*positional, **named)

        self._num_calls += 1
        begun = States({x.device for x in tensors(values)})
        while True:
            try:
                return self._run(run, values, rows)
            except Exception as error:
                is_alone = self.ranks.size == 1 and is_out_of_memory(error)
                if not (is_alone and self.sizes.halve(rows)):
                    raise
                release(error)
                begun.put_back()

    def _is_one(self, rows: int) -> bool:
        """Whether a call needs no cut: it is one chunk, of one rank."""
        limit = self.sizes.limit
        return limit is not None and rows <= limit and self.ranks.size == 1

    def _run(self, run: Any, values: list[Any], rows: int) -> Any:
        layout = Layout(rows, self.sizes.limit or rows)
        cut = [
            place
            for place, each in enumerate(values)
            if isinstance(each, Tensor) and each.ndim and len(each) == rows
        ]
        device = values[cut[0]].device
        surroundings = Surroundings(device)
        store = Store(len(layout.sizes), transport_to(device))
        recorder = Recorder(self.name, layout, store, surroundings, self.ranks)
        given = list(values)
        for place in cut:
            chunks = list(values[place].detach().split(layout.sizes))
            trains = values[place].requires_grad
            given[place] = recorder.add_argument(chunks, trains=trains)
        is_checked = _is_power_of_two(self._num_calls)
        with self.around(None, None), recording(recorder, is_checked=is_checked):
            found = run(given)
        del given
        fields, build = take_apart(found)
        leaves = [each.value for each in fields]
        del found, fields
        left = left_in(self.module, recorder.slot_of)
        slots = [recorder.slot_of(each) for each in leaves]
        wanted = [*slots, *(each.slot for each in left)]
        self._refuse_held(recorder, {slot for slot in wanted if slot is not None})
        made: dict[int, Any] = {}
        for number, slot in enumerate(wanted):
            if slot is not None and slot >= len(cut):
                name = left[number - len(slots)].name if number >= len(slots) else ""
                made[slot] = self._row_dim(recorder, slot, name)
        tape = Tape(
            recorder.segments,
            layout,
            store,
            recorder.shared,
            recorder.fixed,
            recorder.trains,
            surroundings,
            list(range(len(cut))),
            list(made.items()),
        )
        outputs = _joined(tape, recorder)
        del recorder
        tape.tidy()
        if layout.last and is_checked:
            refuse_mixing(tape, [values[place].detach() for place in cut], self.name)
        if not tape.trains.isdisjoint(made):
            inputs = [*(values[place] for place in cut), *tape.shared]
            with torch.enable_grad():  # the forward may have set it
                outputs = list(Taped.apply(tape, outputs, *inputs))  # type: ignore[call-overload]
        results = dict(zip(made, outputs, strict=True))
        results |= {slot: values[place] for slot, place in enumerate(cut)}
        for each in left:
            each.holder[each.key] = results[each.slot]
        pairs = zip(slots, leaves, strict=True)
        whole = [each if slot is None else results[slot] for slot, each in pairs]
        return build(x.whole if type(x) is NumberOfRows else x for x in whole)

    def _row_dim(self, recorder: Recorder, slot: int, name: str) -> int:
        dim = recorder.row_dims[slot]
        if dim is None:
            where = f"leaves in {name}" if name else "returns"
            shape = list(recorder.held()[slot].shape)
            raise TrainkitError(
                f"exact BatchNorm: {self.name} runs in chunks of rows, and it {where} "
                f"a tensor of shape {shape}, which is one for all rows of a chunk. "
                f"Return a value for each row, and take the mean or sum outside."
            )
        return dim

    def _refuse_held(self, recorder: Recorder, known: set[int]) -> None:
        """Refuse values that something keeps, which are those of one chunk."""
        if recorder.held().keys() <= known:
            return
        gc.collect()
        held = recorder.held()
        if others := [list(held[slot].shape) for slot in held.keys() - known]:
            raise TrainkitError(
                f"exact BatchNorm: {self.name} runs in chunks of rows, and something "
                f"outside of its attributes keeps a tensor of shape {others[0]} of its "
                f"forward, which is one chunk's. Return it as an output, or keep it in "
                f"an attribute of the module."
            )

    def _refuse_module(self) -> None:
        """Refuse modules whose operations cannot be written down, or repeated."""
        module, name = self.module, self.name
        if is_transformed() or torch.is_inference_mode_enabled():
            raise TrainkitError(
                f"{name}: exact BatchNorm cannot run in inference mode, or in a "
                f"transform of torch.func. Use torch.no_grad() and loss.backward()."
            )
        if lazy := [p for p, each in module.named_parameters() if is_lazy(each)]:
            raise TrainkitError(
                f"{name}: {listed(lazy)} has no shape yet. Run one batch before exact "
                f"BatchNorm."
            )
        sharded = any(isinstance(each, FSDPModule) for each in module.modules())
        if sharded or any(isinstance(each, DTensor) for each in module.parameters()):
            raise TrainkitError(
                f"{name}: exact BatchNorm cannot run where weights are sharded. Use "
                f"DDP, or another policy."
            )
        reasons = {
            "is scripted": lambda each: isinstance(each, torch.jit.ScriptModule),
            "is compiled": lambda each: hasattr(each, "_orig_mod"),
            "has backward hooks": lambda each: (
                each is not module
                and bool(each._backward_hooks or each._backward_pre_hooks)
            ),
        }
        for why, is_so in reasons.items():
            if paths := [p for p, each in module.named_modules() if is_so(each)]:
                raise TrainkitError(
                    f"{name}: exact BatchNorm runs its operations in chunks, and "
                    f"{listed(paths)} {why}, which hides them. Give the plain module."
                )


def _joined(tape: Tape, recorder: Recorder) -> list[Tensor]:
    """What a call returns, of all chunks."""
    whole: dict[int, Tensor] = {}
    dims = dict(tape.outputs)
    for number, values in recorder.close(set(dims)):
        for slot, dim in dims.items():
            each = values[slot] if slot in values else tape.store.get(number, slot)
            if not tape.layout.last:
                whole[slot] = each.clone()
                continue
            if slot not in whole:
                shape = list(each.shape)
                shape[dim] = shape[dim] * tape.layout.rows // tape.layout.sizes[0]
                whole[slot] = each.new_empty(shape)
            tape.piece(whole[slot], number, dim).copy_(each)
    return list(whole.values())


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0
