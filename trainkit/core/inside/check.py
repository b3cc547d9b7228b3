"""Whether rows stand alone: small runs of the calls 1, 2, 4, 8, ... of each kind.

The outputs of chunks are compared with those of larger groups of rows, which come from
all chunks: so a row's place, the number of rows and the rows beside it differ at once.
Where chunks leave out columns that are padding, the groups have them. The gradient of a
few rows is compared with that of their halves.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from trainkit.core._compat import without_hooks
from trainkit.core.batch_norm.layers import listed
from trainkit.core.generators import States
from trainkit.core.inside.call import Call, Joined
from trainkit.core.inside.cut import strangers_of
from trainkit.core.inside.moment import (
    attributes_of,
    put_back,
    settings_of,
    versions_of,
)
from trainkit.core.inside.outputs import (
    Plan,
    Unfit,
    are_close,
    direction_of,
    plan_of,
    with_columns,
)
from trainkit.core.inside.refusals import OF_CALLS, refusal, refuse_parts
from trainkit.core.inside.rows import COLUMNS, Chunk
from trainkit.core.inside.tokens import Sorted
from trainkit.core.out_of_memory import in_smaller_parts, is_out_of_memory
from trainkit.errors import TrainkitError

FEW = 4
"""The most rows whose gradient is compared with that of their halves."""

ON_DEVICE = 2**-11
"""Kernels of a device may round products to so few digits (TF32)."""


def look(call: Call) -> Plan:
    """Refuse a call whose rows do not stand alone; else, how it is joined."""
    module, arguments, moment = call.cut.module, call.arguments, call.moment
    refuse_parts(module, call.name, OF_CALLS)
    before, begun = moment.state(has_sums=True), States(arguments.devices)

    def put_all_back() -> None:
        begun.put_back()
        put_back(module, moment.settings)
        if torch.is_autocast_cache_enabled():
            torch.clear_autocast_cache()

    def run() -> Plan:
        try:
            plan = Trial(call).plan()
        except Exception as error:
            is_own = isinstance(error, TrainkitError) and not isinstance(error, Unfit)
            if is_own or is_out_of_memory(error):
                raise
            # What moves is why rows seem to see each other.
            moment.check_state(arguments.values)
            raise refusal(error, call) from error
        moment.check_state(arguments.values, before)
        return plan

    halves = partial(call.sizes.halve, arguments.rows)
    try:
        return in_smaller_parts(run, halves, put_all_back)
    finally:
        put_all_back()


class Trial:
    """Runs rows of one call, always with the same draws.

    Attributes:
        begun: the random states that each run begins with.
        has_graph: whether graphs are looked at too.
        has_drawn: whether the last run drew random numbers.
        paths: of the outputs of the last run.
        eps: the coarsest rounding of autocast, and of what graphs have saved.
    """

    def __init__(self, call: Call) -> None:
        self._call, self._shadows, arguments = call, call.shadows, call.arguments
        self._arguments, self.begun = arguments, States(arguments.devices)
        self.has_graph, self.has_drawn = torch.is_grad_enabled(), False
        kinds = {each.type for each in arguments.devices}
        cast = map(torch.get_autocast_dtype, filter(torch.is_autocast_enabled, kinds))
        self.eps = max((torch.finfo(each).eps for each in cast), default=0.0)
        self.paths: list[str] = []

    @contextlib.contextmanager
    def _again(self) -> Iterator[None]:
        """Random states as they were, and whether they have moved."""
        self.begun.put_back()
        yield
        self.has_drawn = not self.begun.are(States(self._arguments.devices))

    def run(self, chunk: Chunk) -> list[Any]:
        """The outputs for some rows, without a graph."""
        with torch.no_grad(), self._again():
            given = self._arguments.of(chunk, self._arguments.values)
            versions = versions_of(given)
            self.paths, outputs, _ = self._arguments.run(self._call.cut, given)
        if versions != versions_of(given):
            raise Unfit("it changes its arguments in place")
        return outputs

    def _leaves(self) -> tuple[list[Any], list[Tensor]]:
        """The arguments of the call, with leaves in place of those that train; and
        these."""
        values, leaves = list(self._arguments.values), list[Tensor]()
        for place, value in enumerate(values):
            if isinstance(value, Tensor) and value.requires_grad:
                values[place] = value.detach().requires_grad_()
                leaves.append(values[place])
        return values, leaves

    def _graph(self, chunk: Chunk, values: Sequence[Any]) -> list[Any]:
        """The outputs for some rows of these arguments, with their graph."""
        with torch.enable_grad(), self._shadows.in_place(), self._again():
            return self._arguments.run(
                self._call.cut, self._arguments.of(chunk, values)
            )[1]

    # ---- outputs ---------------------------------------------------------------------

    def plan(self) -> Plan:
        """How the outputs are joined, if no row depends on another."""
        arguments, sizes = self._arguments, self._call.sizes
        rows = arguments.rows
        if rows <= 1:
            raise Unfit("none of its arguments has rows")
        chunks, size = arguments.chunks(sizes), len(sizes.runs(rows)[0])
        if self.has_graph:
            # First, or a cache is made without a graph.
            self.refuse_what_is_left(arguments.chunk([0, 1][:size]))
        # The capacity of experts shows in more rows than a chunk has, if they fit.
        is_full = sizes.is_auto or size == rows
        number = -(-size // 2) if is_full and size > 1 else min(2 * size, rows)
        groups = list(map(arguments.chunk, _groups(rows, number)))
        picked, beside = groups[0], arguments.chunk([*range(size)])
        unit = next(iter(picked.counts))
        if picked.counts[unit] == beside.counts[unit]:
            other = next(row for row in range(rows) if row not in picked.rows)
            beside = arguments.chunk([*picked.rows, other])
        runs = [(each, self.run(each)) for each in (picked, beside)]
        plan = plan_of(self.paths, runs)
        trimmed = [x for x in chunks if len(x.places[COLUMNS]) < arguments.width]
        if trimmed:
            two, (_, *others) = trimmed[-1].rows[:2], trimmed[-1].places
            narrow = Chunk((two, *others), arguments.totals)
            plan = with_columns(plan, *map(self.run, (arguments.chunk(two), narrow)))
        if self.has_drawn and not self._can_evaluate(picked, plan):
            if trimmed or arguments.by:
                what = "the columns that are padding" if trimmed else "another"
                raise Unfit(
                    f"it draws random numbers in evaluation mode too, so that it "
                    f"cannot be seen whether a row depends on {what}"
                )
            return plan
        most = size if sizes.is_auto else max(size, 2)
        is_mixed = self.has_graph and self.has_mixed_gradients(plan, most)
        self._compare(groups, plan, chunks)
        if is_mixed:
            raise Unfit(
                "the gradient of rows at once is not the sum of their gradients in "
                "chunks, though their outputs are alike. A hook or a backward pass of "
                "its own looks at all rows; or an argument as long as the batch has "
                "no rows, and belongs in shared="
            )
        return plan

    def _can_evaluate(self, picked: Chunk, plan: Plan) -> bool:
        """Whether rows run without draws in evaluation mode, so that a row's place may
        change; in that mode it stays. Else only the rows beside it do."""
        settings = settings_of(self._call.cut.module)
        for each in self._call.cut.module.modules():
            each.training = False
        try:
            found = self.run(picked)
            if not self.has_drawn:
                return len(found) == len(plan)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return False  # it has no other mode
        put_back(self._call.cut.module, settings)
        num = len(picked.rows)
        same = self._arguments.chunk([picked.rows[num // 2]] * num)
        for joint, *both in zip(plan, self.run(picked), self.run(same), strict=True):
            for dim, _ in joint.axes[:1] if not self._arguments.by else ():
                of_row = [each.unflatten(dim, (num, -1)) for each in both]
                pair = [each.select(dim, num // 2) for each in of_row]
                if not are_close(*pair, eps=self.eps):
                    raise Unfit(f"{joint.name} of a row depends on other rows")
        return False

    def _compare(
        self, groups: Sequence[Chunk], plan: Plan, chunks: Sequence[Chunk]
    ) -> None:
        """Refuse outputs of chunks that are not those of their rows beside others."""
        arguments, joined = self._arguments, Joined(plan, self._call.name)
        for chunk in chunks:
            joined.add(chunk, self.run(chunk))
        for group in groups:
            three = zip(plan, joined.values, self.run(group), strict=True)
            for joint, whole, value in three:
                if not joint.axes:
                    continue
                own = group.of(whole, joint.axes[:1])
                if isinstance(arguments, Sorted) and len(joint.axes) > 1:
                    marks = arguments.marks(own, joint.axes, group.rows)
                    own, value = own * marks, value * marks
                if are_close(own, value, eps=self.eps):
                    continue
                columns = ", on the columns that are padding"
                columns = columns if arguments.width else ""
                raise Unfit(
                    f"{joint.name} of a row depends on other rows, on its place among "
                    f"them, on how many there are{columns}, or is another one each "
                    f"time it runs (a generator of its own, a counter)"
                )

    # ---- what a graph leaves ---------------------------------------------------------

    def refuse_what_is_left(self, chunk: Chunk) -> None:
        """Refuse a graph that outlives the outputs: the loss may depend on it, or the
        next chunk, which has none."""
        module, (values, leaves) = self._call.cut.module, self._leaves()
        held: list[weakref.ref[Any]] = []

        def pack(tensor: Tensor) -> _Held:
            found = _Held(tensor.detach())
            held.append(weakref.ref(found))
            if tensor.is_floating_point():
                self.eps = max(self.eps, torch.finfo(tensor.dtype).eps)
            return found

        with saved_tensors_hooks(pack, lambda held: held.tensor):
            outputs = self._graph(chunk, values)
        known = [*self._shadows.own, *leaves]
        strangers = strangers_of(outputs, known, self._call.name)
        foreign = list(map(weakref.ref, strangers))  # one made anew in each run goes
        del outputs, strangers, known, values, leaves
        if _are_alive(foreign):
            raise Unfit(
                "its output depends on a tensor that trains, and is neither a "
                "parameter of it nor an argument"
            )
        names = [
            name
            for name, value in attributes_of(module).items()
            if isinstance(value, Tensor) and value.grad_fn is not None
        ]
        if not names and not _are_alive(held):
            return
        where = listed(names) if names else "a list, a hook or a cache"
        raise Unfit(
            f"its forward leaves tensors with a gradient in {where}, where each chunk "
            f"overwrites those before. Return them as outputs, or detach() them; take "
            f"weight_norm and spectral_norm from torch.nn.utils.parametrizations"
        )

    # ---- gradients -------------------------------------------------------------------

    def has_mixed_gradients(self, plan: Plan, size: int) -> bool:
        """Whether a gradient of some rows is not the sum of their halves': a hook or an
        own backward pass may mix rows that the forward pass keeps apart."""
        rows = self._arguments.rows
        num = min(rows, FEW, size)
        # Once more on other rows: a kink may lie where rounding differs.
        found = [self._is_mixed(plan, range(at, at + num)) for at in (0, rows - num)]
        self._shadows.clear()
        return all(found)

    def _is_mixed(self, plan: Plan, rows: range) -> bool:
        shadows, (values, leaves) = self._shadows, self._leaves()
        middle, devices = len(rows) // 2, self._arguments.devices
        if not middle or not (shadows.own or leaves):
            return False
        shadows.clear()
        ways, sizes = list[Any](), list[float]()
        for part, sign in ((rows, 1), (rows[:middle], -1), (rows[middle:], -1)):
            with without_hooks():
                found = self._graph(self._arguments.chunk(part), values)
            pairs = zip(found, plan, strict=True)
            ways = ways or [direction_of(each, joint.axes) for each, joint in pairs]
            pulled = list[tuple[Tensor, Tensor]]()
            for each, way, joint in zip(found, ways, plan, strict=True):
                is_first = part[0] == rows[0]
                for dim, _ in joint.axes[:1]:
                    size = each.shape[dim]
                    start = 0 if is_first else way.shape[dim] - size
                    way = way.narrow(dim, start, size)
                # What has no rows has one gradient, of any of them.
                counts = joint.axes or is_first
                if counts and isinstance(each, Tensor) and each.requires_grad:
                    pulled.append((each, sign * way))
            if not pulled:
                return False
            before = States(devices)
            outputs, given = zip(*pulled, strict=True)
            with shadows.in_place():  # as a cut within expects
                torch.autograd.backward(outputs, given)
            if not before.are(States(devices)):
                return False  # what draws cannot be compared
            gradients = [*shadows.gradients(), *[each.grad for each in leaves]]
            norms = [float(x.double().norm()) for x in gradients if x is not None]
            sizes.append(sum(each**2 for each in norms) ** 0.5)
            for each in outputs:
                rounding = torch.finfo(each.dtype).eps
                on_device = 0.0 if each.device.type == "cpu" else ON_DEVICE
                self.eps = max(self.eps, rounding, on_device)
        return sizes[0] * 3 * self.eps**0.5 < sizes[-1] < torch.inf


def _groups(rows: int, most: int) -> list[list[int]]:
    """All rows in groups of at most so many, with no two neighbours side by side.

    >>> _groups(8, 4)
    [[6, 2, 4, 0], [7, 3, 5, 1]]
    """
    number = -(-rows // most)
    spread = [list(range(rows))[first::number] for first in range(number)]
    return [[*each[::-2], *each[-2::-2]] for each in spread]


class _Held:
    """What a graph saved; it lives as long as the graph."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def _are_alive(held: Sequence[weakref.ref[Any]]) -> bool:
    if any(each() is not None for each in held):
        gc.collect()
    return any(each() is not None for each in held)
