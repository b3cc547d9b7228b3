"""The forward of a module that runs in chunks of rows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from trainkit.core._compat import uncompiled
from trainkit.core.batch_norm.layers import listed, normalising_by_batch
from trainkit.core.batches import Path
from trainkit.core.inside.arguments import (
    Arguments,
    Names,
    kinds_of,
    refuse_layouts,
)
from trainkit.core.inside.call import Around, Call, Cut
from trainkit.core.inside.checks import Check, refuse_strangers, strangers
from trainkit.core.inside.chunks import Chunk, Sizes
from trainkit.core.inside.draws import Draws
from trainkit.core.inside.hints import announce_whole, refusal
from trainkit.core.inside.keep import Keeper
from trainkit.core.inside.left_behind import announce_left
from trainkit.core.inside.moment import Moment
from trainkit.core.inside.padding import PaddingCheck
from trainkit.core.inside.probe import Probe, compare_chunks
from trainkit.core.inside.rows import Plan, Unfit, multiples_of, num_rows, settle
from trainkit.core.inside.run import run_in_chunks
from trainkit.core.inside.sharded import (
    FixedNumber,
    Shards,
    refuse_flat,
    shards_within,
)
from trainkit.core.inside.tokens import Blocks, ByTokens
from trainkit.core.out_of_memory import is_out_of_memory, release
from trainkit.core.split.fields import take_apart
from trainkit.errors import TrainkitError

MANY = 8
"""With more rows than this, two chunks are compared once with their rows at once."""

MOST_PLANS = 99
"""How many kinds of calls are remembered."""


class ChunkedForward:
    """A module's forward, in chunks of rows; it stands on the instance.

    It is an object, not a function: a copy of the module then has a copy of it, which
    runs the copy, and both can be pickled.

    Args:
        module: whose forward is replaced.
        name: of the module, for messages.
        sizes: how large a chunk may be.
        keeper: how many chunks keep their graph.
        shared: paths of the arguments that every chunk gets whole.
        by_tokens: cuts by the lengths of rows.

    Attributes:
        around: makes a context for each run of a chunk, and of the rows of a probe.
        is_off: whether the module runs uncut for a while.
        was_called: whether it was called to train.
        was_cut: whether a call ran in chunks.
        most_rows: that a call had.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        sizes: Sizes,
        keeper: Keeper,
        shared: Sequence[Path] = (),
        by_tokens: ByTokens | None = None,
    ) -> None:
        self.module, self.name = module, name
        self.sizes, self.keeper = sizes, keeper
        self.around: Around = _nothing
        self.is_off = self.was_called = self.was_cut = False
        self.most_rows = 0
        self._shared = {str(path) for path in shared}
        self._before = vars(module).get("forward")
        self._names = Names(self._original())
        self._names.check(self._shared, name)
        self._draws, self._check = Draws(), Check()
        self.by_tokens, self._padding = by_tokens, PaddingCheck()
        self._plans: dict[Any, tuple[Plan, int]] = {}
        self._with_rows: set[str] = set()
        self._compared: set[Any] = set()

    def install(self) -> None:
        """Take the place of the module's forward."""
        _refuse_module(self.module, self.name)
        vars(self.module)["forward"] = self

    def remove(self) -> None:
        """Give the module its own forward back."""
        if vars(self.module).get("forward") is self:
            del vars(self.module)["forward"]
            if self._before is not None:
                vars(self.module)["forward"] = self._before

    @uncompiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        original, module = self._original(), self.module
        is_evaluation = not module.training and not torch.is_grad_enabled()
        if self.is_off or is_evaluation:
            return original(*args, **kwargs)
        self.was_called = True
        call = self._read(args, kwargs)
        self.most_rows = max(self.most_rows, call.rows)
        shards = shards_within(module, self.name, self.keeper.keep)
        if shards is None and self.by_tokens is None:
            if not self._cuts(self.sizes, call):
                return original(*args, **kwargs)
            return run_in_chunks(self._call(call, self._plan(call), self.sizes))
        return self._by_shards(call, shards) if shards else self._by_tokens(call)

    def _cuts(self, sizes: Sizes, call: Arguments) -> bool:
        is_one = not sizes.is_auto and len(sizes.cut(0, call.rows)) <= 1
        return call.rows > 1 and not is_one

    def _call(self, call: Arguments, plan: Plan, sizes: Sizes, **options: Any) -> Call:
        self.was_cut = True
        cut = Cut(
            self.module,
            call.run,
            self.name,
            sizes,
            self._draws,
            self._check,
            self.keeper,
            self.around,
            **options,
        )
        return Call(cut, plan, call.values, call.rows)

    def _by_shards(self, call: Arguments, shards: Shards) -> Any:
        """Run as many chunks as all ranks do, whose parts FSDP2 shards."""
        if self.by_tokens is not None:
            raise TrainkitError(
                f"{self.name}: parts of it are sharded by FSDP2, whose ranks need "
                f"equally many chunks, and a budget of tokens gives each rank its own "
                f"number. Cut by size= alone."
            )
        _, times = self._plans.get(self._key(call), (None, 0))
        number, probes = shards.agreed(self.sizes, call.rows, probes=is_probed(times))
        sizes = FixedNumber(number)
        if not self._cuts(sizes, call):
            return call.run(call.values)
        with shards.probing() if probes else contextlib.nullcontext():
            plan = self._plan(call, probes=probes, is_sharded=True)
        return run_in_chunks(self._call(call, plan, sizes, shards=shards))

    def _by_tokens(self, call: Arguments) -> Any:
        """Run rows of like length together."""
        assert self.by_tokens is not None
        if call.rows <= 1:
            return call.run(call.values)
        ordered = self.by_tokens.sort(call, self.name)
        sizes = Blocks(ordered.runs, ordered.columns)
        if not self._cuts(sizes, call):
            return call.run(call.values)
        plan = self._plan(call)
        values, options = ordered.values(call.values, plan), {}
        if ordered.is_trimmed:
            key = self._key(call)
            with self._refusing(call), self.around(None, None):
                plan = self.by_tokens.plan(
                    plan, key, call.run, values, ordered, self.module, self._draws
                )
            options = {"padding": self._padding, "width": ordered.width}
        call = replace(call, values=values)
        return run_in_chunks(
            self._call(call, plan, sizes, **options),
            lambda leaves: ordered.restored(leaves, plan),
        )

    def probe(self, *args: Any, **kwargs: Any) -> None:
        """Refuse a module that cannot run in chunks, as one call of it shows."""
        _refuse_module(self.module, self.name)
        self._probe(self._read(args, kwargs))

    def _read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        original, module = self._original(), self.module
        fields, build = take_apart((args, kwargs))

        values = [each.value for each in fields]
        is_flat = len(values) == len(args) and all(map(is_, values, args))

        def run(given: list[Any]) -> Any:
            positional, named = (given, kwargs) if is_flat else build(iter(given))
            with _without_cache(module):
                return original(*positional, **named)

        paths = [self._names.path(each.path) for each in fields]
        shared = {i for i, path in enumerate(paths) if self._is_shared(path)}
        rows = num_rows(values, paths, shared, self._with_rows)
        if rows == 1:
            refuse_layouts(values, paths, shared, self.name)
        return Arguments(run, values, paths, shared, rows)

    def __getstate__(self) -> dict[str, Any]:
        """A copy begins anew: what it has seen holds generators and graphs."""
        begun = {"_draws": Draws(), "_check": Check(), "_plans": {}, "around": _nothing}
        return vars(self) | begun

    def _original(self) -> Any:
        if self._before is not None:
            return self._before
        return type(self.module).forward.__get__(self.module)

    # ---- which arguments have rows ---------------------------------------------------

    def _plan(
        self, call: Arguments, *, probes: bool = False, is_sharded: bool = False
    ) -> Plan:
        key = self._key(call)
        plan, times = self._plans.get(key, (None, 0))
        if plan is None or is_probed(times) or probes:
            plan = self._probe(call, is_sharded=is_sharded)
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
        self._plans[key] = plan, times + 1
        return plan

    def _key(self, call: Arguments) -> Any:
        """What a call has in common with others that are cut alike."""
        return (
            torch.is_grad_enabled(),
            *(each.training for each in self.module.modules()),
            *(each.requires_grad for each in self.module.parameters()),
            *zip(
                call.paths,
                kinds_of(call.values, call.paths, call.rows),
                multiples_of(call.values, max(call.rows, 1), call.shared),
                strict=True,
            ),
        )

    def _probe(self, call: Arguments, *, is_sharded: bool = False) -> Plan:
        """Run a few rows, to see that they do not see each other."""
        if found := normalising_by_batch(self.module):
            names = [name or "the module itself" for name in found]
            raise TrainkitError(
                f"{self.name}: its rows must not see each other, and BatchNorm "
                f"normalises by all rows of a batch: {listed(names)}. Freeze it, use "
                f'BatchNormGuard("group_norm"), or name a module without it.'
            )
        refuse_flat(self.module, self.name)
        moment = Moment(self.module, self.name, call.devices)

        def run(given: list[Any]) -> Any:
            with self.around(None, None):
                return call.run(given)

        probe = Probe(self.module, run, call.values, self._draws)
        probe.may_reenter = is_sharded  # whose chunks have backward passes of their own
        try:
            with self._refusing(call, moment, probe):
                if call.rows <= 1:
                    raise Unfit("none of its arguments has rows")
                plan = settle(
                    probe, call.values, call.rows, call.shared, most=self.sizes.limit
                )
                self._compare(call, plan, probe)
            moment.check_state()
            refuse_flat(self.module, self.name, probe.foreign)
            self.keeper.row_bytes = max(self.keeper.row_bytes, probe.row_bytes)
            refuse_strangers(strangers(probe.foreign, moment.parameters), self.name)
            if not self._plans:
                announce_left(self.module, self.name, probe.left)
                announce_whole(call, plan, self.name)
        finally:
            probe.put_back()
            if torch.is_autocast_cache_enabled():
                torch.clear_autocast_cache()
        pairs = zip(call.paths, plan.multiples, strict=True)
        self._with_rows |= {path for path, multiple in pairs if multiple}
        return plan

    def _compare(self, call: Arguments, plan: Plan, probe: Probe) -> None:
        """Compare two chunks with their rows at once in the first call, where memory
        allows: the capacity of experts, say, does not show in a few rows."""
        key = self._key(call)
        if call.rows <= MANY or key in self._compared:
            return
        self._compared.add(key)
        size = self.sizes.limit or -(-call.rows // 2)
        rows = Chunk(0, min(2 * size, call.rows))
        try:
            compare_chunks(
                plan, probe, call.values, rows, Sizes(size).cut(0, rows.stop)
            )
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            release(error)

    @contextlib.contextmanager
    def _refusing(
        self,
        call: Arguments,
        moment: Moment | None = None,
        probe: Probe | None = None,
    ) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if isinstance(error.__cause__, TrainkitError):
                raise error.__cause__ from None
            is_own = isinstance(error, TrainkitError) and not isinstance(error, Unfit)
            if is_own or is_out_of_memory(error):
                raise
            if moment is not None:
                moment.check_state()  # what moves is why rows seem to see each other
            if probe is not None:
                refuse_flat(self.module, self.name, probe.leaves)
            reason = str(error)
            if not isinstance(error, Unfit):
                reason = (
                    f"it does not run on fewer rows: {type(error).__name__}: {error}"
                )
            raise refusal(reason, call, self.module, self.name) from error

    def _is_shared(self, path: str) -> bool:
        parts = path.split(".")
        return any(".".join(parts[: n + 1]) in self._shared for n in range(len(parts)))


def is_probed(times: int) -> bool:
    """Whether a kind of call that was made so often is looked at again.

    >>> [n for n in range(300) if is_probed(n)]
    [0, 1, 63, 255]
    """
    number = times + 1
    is_power_of_4 = number & (number - 1) == 0 and number.bit_length() % 2 == 1
    return times < 2 or (is_power_of_4 and number >= 64)


def _nothing(call: Any, chunk: Any) -> AbstractContextManager[None]:
    return contextlib.nullcontext()


@contextlib.contextmanager
def _without_cache(module: nn.Module) -> Iterator[None]:
    """Models of transformers return a cache of keys in training too, where nothing
    reads it, and its rows cannot be joined."""
    config = getattr(module, "config", None)
    if getattr(config, "use_cache", False) is not True:
        yield
        return
    config.use_cache = False  # type: ignore[union-attr]
    try:
        yield
    finally:
        config.use_cache = True  # type: ignore[union-attr]


def _refuse_module(module: nn.Module, name: str) -> None:
    if any(is_lazy(each) for each in module.parameters()):
        raise TrainkitError(
            f"{name}: its parameters must have a shape, and lazy ones get theirs in a "
            f"first forward pass. Run one batch before it is cut."
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise TrainkitError(
            f"{name}: a scripted module cannot run in chunks. Give the module that was "
            f"scripted."
        )
    if isinstance(vars(module).get("forward"), ChunkedForward):
        raise TrainkitError(
            f"{name}: it runs in chunks already. Name it once, and remove() the first."
        )
    if module._compiled_call_impl is not None:
        raise TrainkitError(
            f"{name}: it was compiled in place by compile(), which would trace the "
            f"cut. Write module = torch.compile(module) instead, and cut that."
        )
