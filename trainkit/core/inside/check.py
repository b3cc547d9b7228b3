"""Whether rows stand alone: small runs of the calls 1, 2, 4, 8, ... of each kind.

The outputs of chunks are compared with those of some of their rows, in another order,
in one run: so a row's place, the number of rows and the rows beside it differ at once.
The gradient of a few rows is compared with that of their halves.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from trainkit.core.batch_norm.layers import listed
from trainkit.core.inside.chunks import Chunk, Sizes
from trainkit.core.inside.closeness import are_close
from trainkit.core.inside.cut import Cut
from trainkit.core.inside.draws import States
from trainkit.core.inside.moment import (
    Moment,
    changed,
    put_back,
    settings_of,
    version_of,
)
from trainkit.core.inside.outputs import Joined, Joint, Plan, Unfit, plan_of, rows_of
from trainkit.core.inside.refusals import refusing
from trainkit.core.inside.rows import Arguments
from trainkit.core.inside.shadows import leaves_of, refuse_shards, refuse_strangers
from trainkit.core.nested import Field
from trainkit.core.out_of_memory import is_out_of_memory, release

MOST_KINDS = 99
"""How many kinds of calls are remembered."""

FEW = 4
"""The most rows whose gradient is compared with that of their halves."""

REENTRANT = "CheckpointFunctionBackward"

ON_DEVICE = 2**-11
"""Kernels of a device may round products to so few digits (TF32)."""


class Checks:
    """Knows how each kind of call is joined, and when it is to be looked at.

    Args:
        cut: which is called.
    """

    def __init__(self, cut: Cut) -> None:
        self._cut = cut
        self._kinds: dict[Any, tuple[Plan, int]] = {}

    def find(self, arguments: Arguments, sizes: Sizes) -> tuple[Plan, bool]:
        """How a call is joined, and whether it was looked at now.

        Args:
            arguments: of the call.
            sizes: of the chunks that are looked at.
        """
        key = self._key(arguments)
        plan, times = self._kinds.get(key, (None, 0))
        number = times + 1
        is_looked_at = plan is None or not number & (number - 1)
        if plan is None or is_looked_at:
            plan = self.look(arguments, sizes)
            if len(self._kinds) >= MOST_KINDS:
                self._kinds.clear()
        self._kinds[key] = plan, number
        return plan, is_looked_at

    def look(self, arguments: Arguments, sizes: Sizes) -> Plan:
        """Refuse a call whose rows do not stand alone; else, how it is joined."""
        cut = self._cut
        moment = Moment(cut.module, cut.name, arguments.devices)
        sums = moment.sums()
        refuse_shards(cut.module, cut.name)
        while True:
            try:
                with looking(cut, arguments, moment) as look:
                    plan = look.plan(sizes)
                moment.check_sums(sums)
                return plan
            except Exception as error:
                if not is_out_of_memory(error) or not sizes.halve(arguments.rows):
                    raise
                release(error)

    def _key(self, arguments: Arguments) -> Any:
        """What a call has in common with others of its kind: modes and flags, what
        trains, and which arguments have rows."""
        settings = settings_of(self._cut.module).values()
        values = zip(arguments.paths, arguments.values, arguments.cut, strict=True)
        return (
            torch.is_grad_enabled(),
            *[each for each in settings if isinstance(each, bool | str)],
            *[each.requires_grad for each in self._cut.module.parameters()],
            *[
                (path, is_cut, value.ndim if isinstance(value, Tensor) else type(value))
                for path, value, is_cut in values
            ],
        )


@contextlib.contextmanager
def looking(cut: Cut, arguments: Arguments, moment: Moment) -> Iterator[Look]:
    """What runs rows of a call; behind it the module, and what draws, are as before.

    Args:
        cut: which is called.
        arguments: of the call.
        moment: what the module is like.
    """
    look, before = Look(cut, arguments, moment), moment.settings
    try:
        with refusing(cut.module, cut.name, arguments, moment):
            yield look
        moment.check_state()
    finally:
        look.begun.put_back()
        put_back(before, changed(before, settings_of(cut.module)))
        if torch.is_autocast_cache_enabled():
            torch.clear_autocast_cache()


class Look:
    """Runs rows of one call, always with the same draws.

    Args:
        cut: which is called.
        arguments: of the call.
        moment: what the module is like.

    Attributes:
        begun: the random states that each run begins with.
    """

    def __init__(self, cut: Cut, arguments: Arguments, moment: Moment) -> None:
        self._cut, self._arguments, self._moment = cut, arguments, moment
        self.begun = States(arguments.devices, of_host=True)
        self._shadows = cut.shadows(moment.parameters)
        self._has_graph = torch.is_grad_enabled()
        self._evaluates = self._has_drawn = False
        self._eps = 0.0

    def plan(self, sizes: Sizes) -> Plan:
        """How the outputs are joined, if no row depends on another."""
        rows = self._arguments.rows
        if rows <= 1:
            raise Unfit("none of its arguments has rows")
        chunks = sizes.cut(rows)
        size = chunks[0].num_rows
        if self._has_graph:
            self._refuse_what_is_left(size)  # first, or a cache is made without a graph
        # The capacity of experts shows in more rows than a chunk has, if they fit.
        is_full = sizes.is_auto or size == rows
        number = -(-size // 2) if is_full and size > 1 else min(2 * size, rows)
        picked = _picked(rows, number)
        plan = plan_of(self._run(picked), self._run(range(size)), number, size)
        if self._has_drawn and not self._can_evaluate(picked, plan):
            return plan
        is_mixed = self._has_graph and self._has_mixed_gradients(
            plan, size if sizes.is_auto else max(size, 2)
        )
        self._compare(picked, plan, chunks)
        if is_mixed:
            raise Unfit(
                "the gradient of rows at once is not the sum of their gradients in "
                "chunks, though their outputs are alike. A hook or a backward pass of "
                "its own looks at all rows; or an argument as long as the batch has "
                "no rows, and belongs in shared="
            )
        return plan

    def _run(self, rows: Sequence[int]) -> list[Field]:
        """The outputs for some rows, without a graph."""
        arguments = self._arguments
        given = arguments.taken(rows, arguments.values)
        tensors = [each for each in given if isinstance(each, Tensor)]
        versions = list(map(version_of, tensors))
        with torch.no_grad(), self._again():
            fields = self._cut.fields(None, None, arguments, given)
        if versions != list(map(version_of, tensors)):
            raise Unfit("it changes its arguments in place")
        return fields

    @contextlib.contextmanager
    def _again(self) -> Iterator[None]:
        """Random states as they were, and evaluation mode if that is compared."""
        self.begun.put_back()
        modules = list(self._cut.module.modules()) if self._evaluates else []
        modes = [(each, each.training) for each in modules]
        for each, _ in modes:
            each.training = False
        try:
            yield
        finally:
            for each, mode in modes:
                each.training = mode
        now = States(self._arguments.devices, of_host=True)
        self._cut.draws_of_host |= self.begun.has_host_moved()
        self._has_drawn = not self.begun.are(now)

    def with_and_without(self, sample: Chunk) -> list[list[Any]]:
        """The outputs of a chunk with all columns, and with its own alone."""
        both: list[list[Any]] = []
        for chunk in (replace(sample, columns=None), sample):
            given = self._arguments.of(chunk, self._arguments.values)
            with torch.no_grad(), self._again():
                fields = self._cut.fields(None, None, self._arguments, given)
            both.append([each.value for each in fields])
        if self._has_drawn and not self._evaluates:
            self._evaluates = True  # other columns would have other draws
            return self.with_and_without(sample)
        return both

    # ---- outputs ---------------------------------------------------------------------

    def _can_evaluate(self, picked: Sequence[int], plan: Plan) -> bool:
        """Whether rows run without draws in evaluation mode, so that a row's place may
        change. Else only the rows beside it do."""
        self._evaluates = True
        try:
            found = self._run(picked)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return False  # it has no other mode
        if not self._has_drawn:
            return len(found) == len(plan)
        self._evaluates, at = False, len(picked) // 2
        found, alone = self._run(picked), self._run([picked[at]] * len(picked))
        for joint, one, other in zip(plan, found, alone, strict=True):
            if joint.dim is not None:
                pair = [rows_of(each.value, joint, [at]) for each in (one, other)]
                if not are_close(*pair, eps=self._eps):
                    raise Unfit(f"{joint.name} of a row depends on other rows")
        return False

    def _compare(
        self, picked: Sequence[int], plan: Plan, chunks: Sequence[Chunk]
    ) -> None:
        """Refuse outputs of chunks that are not those of their rows beside others."""
        arguments = self._arguments
        found = self._run(picked)
        joined = Joined(plan, arguments.rows, self._cut.name)
        for chunk in chunks:
            fields = self._run(range(chunk.start, chunk.stop))
            joined.add(chunk, [each.value for each in fields])
        for joint, field, whole in zip(plan, found, joined.values, strict=True):
            if joint.dim is None:
                continue
            own = rows_of(whole, joint, picked)
            if not are_close(own, field.value, eps=self._eps):
                again = self._run(picked)[list(plan).index(joint)].value
                if not are_close(field.value, again, eps=self._eps):
                    raise Unfit(
                        f"{joint.name} is another one each time it runs. It draws from "
                        f"a generator of its own, or counts its runs: draw from "
                        f"torch's generator"
                    )
                raise Unfit(
                    f"{joint.name} of a row depends on other rows, on its place among "
                    f"them, or on how many there are"
                )

    # ---- gradients -------------------------------------------------------------------

    def _refuse_what_is_left(self, size: int) -> None:
        """Refuse a graph that outlives the outputs: the loss may depend on it, or the
        next chunk, which has none."""
        arguments, module = self._arguments, self._cut.module
        rows = range(min(size, 2))
        given, leaves = self._given(rows)
        held: list[weakref.ref[Any]] = []

        def pack(tensor: Tensor) -> _Held:
            found = _Held(tensor.detach())
            held.append(weakref.ref(found))
            if tensor.is_floating_point():
                self._eps = max(self._eps, torch.finfo(tensor.dtype).eps)
            return found

        with torch.enable_grad(), self._shadows.in_place(), self._again():
            try:
                with saved_tensors_hooks(pack, lambda held: held.tensor):
                    fields = self._cut.fields(None, None, arguments, given)
            except RuntimeError as error:
                if not _is_no_place_for_hooks(error):
                    raise
                self._has_graph = False
                return
        found = leaves_of([each.value for each in fields], refused=REENTRANT)
        known = {id(each) for each in (*self._shadows.own, *leaves)}
        strangers = [each for each in found if id(each) not in known]
        refuse_strangers(
            [each for each in strangers if isinstance(each, nn.Parameter)],
            self._cut.name,
        )
        others = [each for each in fields if not isinstance(each.value, Tensor)]
        del fields, found, strangers, given, leaves
        names = [
            f"{path}.{name}".lstrip(".")
            for path, each in module.named_modules()
            for name, value in vars(each).items()
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

    def _given(self, rows: Sequence[int]) -> tuple[list[Any], list[Tensor]]:
        """The values of some rows, and those of them that train."""
        given = self._arguments.taken(rows, self._arguments.values)
        for index, value in enumerate(self._arguments.values):
            if isinstance(value, Tensor) and value.requires_grad:
                given[index] = given[index].detach().requires_grad_()
        return given, [x for x in given if isinstance(x, Tensor) and x.requires_grad]

    def _has_mixed_gradients(self, plan: Plan, size: int) -> bool:
        """Whether a gradient of some rows is not the sum of their halves': a hook or an
        own backward pass may mix rows that the forward pass keeps apart."""
        rows = self._arguments.rows
        num = min(rows, FEW, size)
        # Once more on other rows: a kink may lie where rounding differs.
        found = [self._is_mixed(plan, range(at, at + num)) for at in (0, rows - num)]
        self._shadows.clear()
        return all(found)

    def _is_mixed(self, plan: Plan, rows: Sequence[int]) -> bool:
        arguments, shadows, num = self._arguments, self._shadows, len(rows)
        given, leaves = self._given(rows)
        if num < 2 or not (shadows.own or leaves):
            return False
        shadows.clear()
        sizes: list[float] = []
        for start, stop, sign in ((0, num, 1), (0, num // 2, -1), (num // 2, num, -1)):
            with torch.enable_grad(), shadows.in_place(), self._again():
                part = arguments.of(Chunk(start, stop), given)
                with saved_tensors_hooks(_itself, _itself):  # not those around
                    fields = self._cut.fields(None, None, arguments, part)
                pulled = [
                    (x.value, sign * _direction(x.value, joint, start))
                    for x, joint in zip(fields, plan, strict=True)
                    if joint.dim is not None and x.value.requires_grad
                ]
                if not pulled:
                    return False
                before = States(arguments.devices, of_host=True)
                outputs, given_to = (list(each) for each in zip(*pulled, strict=True))
                torch.autograd.backward(outputs, given_to)
                if not before.are(States(arguments.devices, of_host=True)):
                    return False  # what draws cannot be compared
            found = [*shadows.gradients(), *[each.grad for each in leaves]]
            norms = [each.double().norm() for each in found if each is not None]
            sizes.append(float(torch.stack([x.cpu() for x in norms]).norm()))
            for output, _ in pulled:
                self._eps = max(self._eps, torch.finfo(output.dtype).eps)
                if output.device.type != "cpu":
                    self._eps = max(self._eps, ON_DEVICE)
        return sizes[0] * 3 * self._eps**0.5 < sizes[-1] < torch.inf


class _Held:
    """What a graph saved; it lives as long as the graph."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def _are_alive(held: Sequence[weakref.ref[Any]]) -> bool:
    for _ in range(2):
        if all(each() is None for each in held):
            return False
        gc.collect()
    return any(each() is not None for each in held)


def _is_no_place_for_hooks(error: RuntimeError) -> bool:
    """Whether functions of torch.func have refused what is added to a graph."""
    return any(word in str(error) for word in ("saved tensor hooks", "functorch"))


def _picked(rows: int, number: int) -> list[int]:
    """So many of the rows, from all of them, in an order in which no two neighbours
    stay.

    >>> _picked(8, 4)
    [6, 2, 4, 0]
    """
    spread = [place * rows // number for place in range(number)]
    return [*spread[::-2], *spread[-2::-2]]


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _direction(value: Tensor, joint: Joint, start: int) -> Tensor:
    """A gradient that gives each row its own, whichever rows are beside it."""
    assert joint.dim is not None
    inner = value.detach().movedim(joint.dim, 0)
    places = torch.arange(value.numel(), device=value.device).view(inner.shape)
    wide = (places + start * joint.multiple * inner[0].numel()).double()
    return wide.mul(1.7).cos().movedim(0, joint.dim).to(value.dtype)
