"""Whether rows stand alone: small runs of the calls 1, 2, 4, 8, ... of each kind.

The outputs of chunks are compared with those of larger groups of rows, which come from
all chunks: so a row's place, the number of rows and the rows beside it differ at once.
Where chunks leave out columns that are padding, the groups have them. The gradient of a
few rows in chunks is compared with autograd's. Whatever is drawn meanwhile is one
number, so that rows may change their places.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from trainkit.core._compat import Operators, without_hooks
from trainkit.core.batch_norm.layers import listed, normalising_by_batch
from trainkit.core.generators import States
from trainkit.core.inside.call import Call
from trainkit.core.inside.chunks import Chunk, Sizes
from trainkit.core.inside.closeness import apart, are_close
from trainkit.core.inside.cut import Cut
from trainkit.core.inside.moment import Moment, attributes_of, put_back
from trainkit.core.inside.outputs import Joint, Plan, Unfit, plan_of, rows_of
from trainkit.core.inside.refusals import OF_ROWS, refuse_parts, refusing
from trainkit.core.inside.rows import Arguments
from trainkit.core.inside.shadows import Shadows, strangers_of
from trainkit.core.nested import Field
from trainkit.core.out_of_memory import in_smaller_parts
from trainkit.errors import TrainkitError

FEW = 4
"""The most rows whose gradient is looked at."""

ON_DEVICE = 2**-11
"""Kernels of a device may round products to so few digits (TF32)."""

DRAWN = 0.4
"""What is drawn while rows are compared."""


def look(cut: Cut, arguments: Arguments, sizes: Sizes, moment: Moment) -> Plan:
    """Refuse a call whose rows do not stand alone; else, how it is joined.

    Args:
        cut: which is called.
        arguments: of the call.
        sizes: of the chunks that are looked at.
        moment: what the module was like before.
    """
    if found := normalising_by_batch(cut.module):
        names = [each or "the module itself" for each in found]
        raise TrainkitError(
            f"{cut.name}: its rows must not see each other, and BatchNorm normalises "
            f"by all rows of a batch: {listed(names)}. Freeze it, use "
            f'BatchNormGuard("exact"), or name a module without it.'
        )
    refuse_parts(cut.module, cut.name, OF_ROWS)
    sums, begun = moment.sums(), States(arguments.devices)

    def put_all_back() -> None:
        begun.put_back()
        put_back(cut.module, moment.settings)
        torch.clear_autocast_cache()

    def run() -> Plan:
        draws = _Draws(arguments.devices)
        rows = _Rows(cut, arguments, sizes, moment, draws)
        with refusing(cut.module, cut.name, arguments, moment):
            with without_hooks(), Operators(draws.run):
                plan = rows.plan()
        moment.check_state(sums)
        return plan

    try:
        return in_smaller_parts(run, lambda: sizes.halve(arguments.rows), put_all_back)
    finally:
        put_all_back()


class _Draws:
    """Lets every draw of torch be the same number, and leaves nothing out.

    Args:
        devices: on which a module may draw.

    Attributes:
        eps: the coarsest rounding of all that was computed.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._devices, self.eps = devices, 0.0

    def run(self, operator: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator of torch."""
        draws = torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ())
        found = (self._drawn if draws else operator)(
            *[operator][:draws], *args, **kwargs
        )
        for each in found if isinstance(found, tuple | list) else (found,):
            if isinstance(each, Tensor) and each.is_floating_point():
                self.eps = max(self.eps, torch.finfo(each.dtype).eps)
        return found

    def _drawn(self, operator: Any, *args: Any, **kwargs: Any) -> Any:
        names = [each.name for each in operator._schema.arguments]
        before = States(self._devices, of_host=False)
        is_dropout = operator is torch.ops.aten.native_dropout.default
        for place, name in enumerate(names[: len(args)]):
            if name in ("dropout_p", "dropout") or name == "p" and is_dropout:
                args = *args[:place], 0.0, *args[place + 1 :]
                is_dropout = True
        found = operator(*args, **kwargs)
        if not before.are(States(self._devices, of_host=False)):
            before.put_back()
            for each in found if isinstance(found, tuple | list) else (found,):
                if isinstance(each, Tensor) and not is_dropout:
                    each.fill_(DRAWN) if each.is_floating_point() else each.zero_()
        return found


class _Rows:
    """Runs rows of a call to look at them.

    Args:
        cut: which is called.
        arguments: of the call.
        sizes: of chunks.
        moment: what the module is like.
        draws: lets them be alike.
    """

    def __init__(
        self,
        cut: Cut,
        arguments: Arguments,
        sizes: Sizes,
        moment: Moment,
        draws: _Draws,
    ) -> None:
        self._cut, self._arguments, self._sizes = cut, arguments, sizes
        self._moment, self._draws = moment, draws
        self._begun = States(arguments.devices)
        self._has_graph, self._has_drawn = torch.is_grad_enabled(), False

    def plan(self) -> Plan:
        """How the outputs are joined, if no row depends on another."""
        arguments, rows = self._arguments, self._arguments.rows
        if rows <= 1:
            raise Unfit("none of its arguments has rows")
        size, is_auto = self._sizes.cut(rows)[0].stop, self._sizes.is_auto
        self._look_for_draws(range(min(size, 2)))
        # The capacity of experts shows in more rows than a chunk has, if they fit.
        is_full = is_auto or size == rows
        number = -(-size // 2) if is_full and size > 1 else min(2 * size, rows)
        groups = _groups(rows, number)
        some, (other, num, columns) = self._run(groups[0]), self._narrow(size)
        width = arguments.width
        num_rows = len(groups[0]), num
        plan = plan_of(some, other, num_rows, (width, columns))
        few = min(rows, FEW, size if is_auto else max(size, 2))
        # Once more on other rows: a kink may lie where rounding differs.
        is_mixed = self._has_graph and all(
            [self._is_mixed(plan, range(at, at + few)) for at in (0, rows - few)]
        )
        self._compare(plan, groups)
        if is_mixed:
            raise Unfit(
                "the gradient of rows at once is not the sum of their gradients in "
                "chunks, though their outputs are alike. A hook or a backward pass of "
                "its own looks at all rows; or an argument as long as the batch has "
                "no rows, and belongs in shared="
            )
        return plan

    def _run(
        self, rows: Sequence[int] | Arguments, *, has_graph: bool = False
    ) -> list[Field]:
        """The outputs for some rows, with their paths; always with the same draws."""
        given = rows if isinstance(rows, Arguments) else self._arguments.at(rows)
        self._begun.put_back()
        torch.clear_autocast_cache()  # it holds weights without a graph
        with torch.set_grad_enabled(has_graph):
            fields, _ = self._cut.run(given, given.values)
        self._has_drawn = not self._begun.are(States(self._arguments.devices))
        return fields

    def _narrow(self, size: int) -> tuple[list[Any], int, int]:
        """The outputs of another number of rows, with fewer columns if chunks leave
        some out; and both numbers."""
        arguments, columns = self._arguments, (0, self._arguments.width)
        chunk = Chunk(0, size)
        for each in arguments.by_length.chunks if arguments.by_length else ():
            if each.columns != columns:
                chunk = replace(each, stop=each.start + 1)
        first, stop = chunk.columns or columns
        few = replace(arguments, values=arguments.of(chunk))
        fields = [each.value for each in self._run(few)]
        return fields, chunk.stop - chunk.start, stop - first

    def _look_for_draws(self, rows: Sequence[int]) -> None:
        """Look at a graph first, or a cache is made without one; and go to evaluation
        mode if other draws than torch's are seen."""
        look = self._refuse_what_is_left if self._has_graph else self._run
        look(rows)
        self._moment.check_state()
        if self._has_drawn:
            for each in self._cut.module.modules():
                each.training = False
            of = self._cut.module, self._cut.name, self._arguments.devices
            self._moment = Moment(*of)
            look(rows)
        if self._has_drawn:
            raise Unfit(
                "it draws from NumPy's or Python's generator in evaluation mode too, "
                "so that it cannot be seen whether its rows stand alone. Draw from "
                "torch's generator"
            )

    # ---- what a graph leaves ---------------------------------------------------------

    def _refuse_what_is_left(self, rows: Sequence[int]) -> None:
        """Refuse a graph that outlives the outputs: the loss may depend on it, or the
        next chunk, which has none."""
        module, given, shadows = self._with_shadows(rows)
        edges = [get_gradient_edge(each) for each in shadows.own]
        held = [_mark(each) for each in edges]
        with shadows.in_place():
            fields = self._run(given, has_graph=True)
        del edges
        outputs = [each.value for each in fields]
        strangers = strangers_of(outputs, shadows.own, self._cut.name)
        foreign = list(map(weakref.ref, strangers))  # one made anew in each run goes
        others = [each for each in fields if not isinstance(each.value, Tensor)]
        del fields, outputs, strangers, given
        torch.clear_autocast_cache()
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
        for path, value in others:
            if hasattr(value, "__dict__") or isinstance(value, set):
                raise Unfit(
                    f"its output {path!r} is a {type(value).__name__}, which cannot be "
                    f"joined from those of chunks"
                )
        where = listed(names) if names else "a list, a hook or a cache"
        raise Unfit(
            f"its forward leaves tensors with a gradient in {where}, where each chunk "
            f"overwrites those of the one before. Return them as outputs, or detach() "
            f"them"
        )

    # ---- gradients -------------------------------------------------------------------

    def _is_mixed(self, plan: Plan, rows: Sequence[int]) -> bool:
        """Whether the gradient of some rows in chunks is not autograd's, of all of them
        turned round: a hook or an own backward pass may mix rows."""
        given, order = self._arguments.at(rows), range(len(rows))[::-1]
        if len(rows) < 2 or not (self._moment.parameters or given.trained):
            return False
        of = self._cut, given, self._moment, plan, Sizes(-(-len(rows) // 2))
        call = Call(*of, has_graph=True, is_trial=True)
        self._begun.put_back()
        pairs = [
            (joint, _direction(leaf))
            for joint, leaf in zip(plan, call.run(), strict=True)
            if isinstance(leaf, Tensor)
        ]
        found = call.backward((), [direction for _, direction in pairs])
        _, turned, shadows = self._with_shadows(rows[::-1])
        with shadows.in_place():
            fields = self._run(turned, has_graph=True)
            tensors = [x.value for x in fields if isinstance(x.value, Tensor)]
            pulled = [
                (x, way if joint.dim is None else rows_of(way, joint, order))
                for x, (joint, way) in zip(tensors, pairs, strict=True)
                if x.requires_grad
            ]
            ends, ways = [x for x, _ in pulled], [way for _, way in pulled]
            if pulled:
                torch.autograd.backward(ends, ways)
        wanted, number = shadows.gradients(), len(self._moment.parameters)
        trains = [isinstance(x, Tensor) and x.requires_grad for x in given.values]
        cut = [is_cut for is_cut, it in zip(given.cut, trains, strict=True) if it]
        for place, is_cut in enumerate(cut, number):
            gradient = wanted[place]
            if is_cut and gradient is not None:
                wanted[place] = gradient.flip(0)
        on_device = 0.0 if all(x.device.type == "cpu" for x in tensors) else ON_DEVICE
        eps = max(self._draws.eps, on_device)
        return apart(_dense(found), _dense(wanted)) > 3 * eps**0.5

    def _with_shadows(self, rows: Sequence[int]) -> tuple[Any, Arguments, Shadows]:
        """The module, the arguments of some rows, and what stands for what trains."""
        module, given = self._cut.module, self._arguments.at(rows)
        shadows = Shadows(module, [*self._moment.parameters, *given.trained])
        own = shadows.own[len(self._moment.parameters) :]
        return module, given.with_trained(own), shadows

    # ---- outputs ---------------------------------------------------------------------

    def _compare(self, plan: Plan, groups: Sequence[list[int]]) -> None:
        """Refuse outputs of chunks that are not those of their rows beside others."""
        of, eps = (self._cut, self._arguments, self._moment, plan), self._draws.eps
        call = Call(*of, self._sizes, has_graph=False, is_trial=True)
        self._begun.put_back()
        joined = call.run()
        for rows in groups:
            found = self._run(rows)
            for index, (joint, whole) in enumerate(zip(plan, joined, strict=True)):
                if joint.dim is None:
                    continue
                own, value = rows_of(whole, joint, rows), found[index].value
                if joint.padded:
                    marks = self._marks(own, joint, rows)
                    own, value = own * marks, value * marks
                if are_close(own, value, eps=eps):
                    continue
                again = self._run(rows)[index].value
                if not are_close(found[index].value, again, eps=eps):
                    raise Unfit(
                        f"{joint.name} is another one each time it runs. It draws from "
                        f"a generator of its own, or counts its runs: draw from "
                        f"torch's generator"
                    )
                has_columns = self._arguments.by_length is not None
                columns = ", or on the columns that are padding" * has_columns
                raise Unfit(
                    f"{joint.name} of a row depends on other rows, on its place among "
                    f"them, or on how many there are{columns}"
                )

    def _marks(self, value: Tensor, joint: Joint, rows: Sequence[int]) -> Tensor:
        """1 where an output of some rows is no padding."""
        by_length, width = self._arguments.by_length, self._arguments.width
        assert by_length is not None
        assert joint.dim is not None
        spans = [by_length.spans[row] for row in rows]
        bounds = torch.tensor(spans, device=value.device)
        columns = torch.arange(width, device=value.device)
        marks = (columns >= bounds[:, :1]) & (columns < bounds[:, 1:])
        marks = marks.repeat_interleave(joint.multiple, 0)
        shape = [1] * value.ndim
        shape[joint.dim], shape[joint.padded[0]] = marks.shape
        return (marks if joint.dim < joint.padded[0] else marks.T).reshape(shape)


class _Mark:
    """What a graph holds, and nothing else."""


def _mark(edge: Any) -> weakref.ref[Any]:
    """A mark that lives as long as a graph that begins here."""
    edge.node.metadata["trainkit"] = mark = _Mark()
    return weakref.ref(mark)


def _are_alive(held: Sequence[weakref.ref[Any]]) -> bool:
    if any(each() is not None for each in held):
        gc.collect()
    return any(each() is not None for each in held)


def _dense(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [x if x is None or not x.is_sparse else x.to_dense() for x in gradients]


def _direction(value: Tensor) -> Tensor:
    """A gradient that gives each entry its own weight."""
    places = torch.arange(value.numel(), device=value.device).view(value.shape)
    return places.double().mul(1.7).cos().to(value.dtype)


def _groups(rows: int, most: int) -> list[list[int]]:
    """All rows in groups of at most so many, with no two neighbours side by side.

    >>> _groups(8, 4)
    [[6, 2, 4, 0], [7, 3, 5, 1]]
    """
    number = -(-rows // most)
    spread = [list(range(rows))[first::number] for first in range(number)]
    return [[*each[::-2], *each[-2::-2]] for each in spread]
