"""The forward of a module that runs in chunks of rows."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from trainkit.core._compat import is_transformed, uncompiled
from trainkit.core.batch_norm.layers import normalising_by_batch
from trainkit.core.inside.arguments import (
    Arguments,
    Names,
    Watched,
    refuse_layouts,
)
from trainkit.core.inside.call import Call
from trainkit.core.inside.checks import Check
from trainkit.core.inside.chunks import Sizes
from trainkit.core.inside.cut import Around, Coupling, Cut, no_shares
from trainkit.core.inside.draws import Draws
from trainkit.core.inside.keep import Keeper
from trainkit.core.inside.padding import PaddingCheck
from trainkit.core.inside.plans import Plans, refusing
from trainkit.core.inside.rows import Plan, num_rows
from trainkit.core.inside.run import run_in_chunks
from trainkit.core.inside.sharded import (
    FixedNumber,
    Shards,
    shards_within,
)
from trainkit.core.inside.sums import Shares
from trainkit.core.inside.tokens import Blocks, ByTokens
from trainkit.core.nested import Path, take_apart
from trainkit.errors import TrainkitError


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
        shares: makes what looks at the chunks of a call of so many rows.
        coupling: lets rows see each other where layers of the module need it.
        turning: what holds something of the chunk under way, while draws are measured.
        is_off: whether the module runs uncut for a while.
        was_called: whether it was called to train.
        was_cut: whether a call ran in chunks.
        most_rows: that a call had.
        is_copy: whether it came with a copy of its module, which may be cut anew.
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
        self.shares: Callable[[int], Shares | None] = no_shares
        self.coupling: Coupling | None = None
        self.turning: Sequence[Any] = ()
        self.is_off = self.was_called = self.was_cut = False
        self.most_rows, self.is_copy = 0, False
        _remove_copied(module)
        self._shared = {str(path) for path in shared}
        self._before = vars(module).get("forward")
        self._names = Names(self._original())
        self._names.check(self._shared, name)
        self._draws, self._check = Draws(), Check()
        self.by_tokens, self._padding = by_tokens, PaddingCheck()
        self._plans = Plans(module, name, self._draws)

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
        if sys.exc_info()[0] is None:
            self._padding.read()

    @uncompiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        original, module = self._original(), self.module
        is_evaluation = not module.training and not torch.is_grad_enabled()
        if self.is_off or is_evaluation:
            return original(*args, **kwargs)
        if is_transformed():
            raise TrainkitError(
                f"{self.name}: it runs in chunks of rows, which transforms of "
                f"torch.func cannot see through. Use loss.backward(), or do not cut it."
            )
        self.was_called = True
        call = self._read(args, kwargs)
        self.most_rows = max(self.most_rows, call.rows)
        shards = shards_within(module, self.name, self.keeper.keep)
        if self.coupling is not None and normalising_by_batch(module):
            return self._coupled(call, self.coupling, is_sharded=shards is not None)
        if shards is None and self.by_tokens is None:
            if not self._cuts(self.sizes, call):
                return original(*args, **kwargs)
            plan = self._plans.find(call, self.sizes.limit, self.around)
            return run_in_chunks(self._call(call, plan, self.sizes))
        return self._by_shards(call, shards) if shards else self._by_tokens(call)

    def _cuts(self, sizes: Sizes, call: Arguments) -> bool:
        is_one = not sizes.is_auto and len(sizes.cut(0, call.rows)) <= 1
        return call.rows > 1 and not is_one

    def _call(self, call: Arguments, plan: Plan, sizes: Sizes, **options: Any) -> Call:
        cut = self._cut(call, sizes, **options)
        return Call(cut, plan, call.values, call.rows)

    def _cut(self, call: Arguments, sizes: Sizes, **options: Any) -> Cut:
        self.was_cut, keeper = True, self.keeper
        keeper.row_bytes = max(keeper.row_bytes, self._plans.row_bytes)
        return Cut(
            self.module,
            call.run,
            self.name,
            sizes,
            self._draws,
            self._check,
            keeper,
            self.around,
            self.shares,
            **options,
        )

    def _coupled(self, call: Arguments, coupling: Coupling, *, is_sharded: bool) -> Any:
        """Run chunks whose BatchNorm layers see all rows."""
        if is_sharded or self.by_tokens is not None:
            why = "FSDP2 shards it" if is_sharded else "tokens= leaves out padding"
            raise TrainkitError(
                f"{self.name}: exact BatchNorm needs whole chunks of a whole module, "
                f"and {why}. Cut by size= alone, under DDP, or use another policy."
            )
        is_one_row = call.rows < 2  # its layers ask other ranks by themselves
        if is_one_row or not (self._cuts(self.sizes, call) or coupling.spans_ranks):
            return call.run(call.values)
        with coupling.uncoupled(self.module):
            plan = self._plans.find(
                call, self.sizes.limit, self.around, is_coupled=True
            )
        cut = self._cut(call, self.sizes, turning=self.turning)
        return run_in_chunks(coupling.call(cut, plan, call.values, call.rows))

    def _by_shards(self, call: Arguments, shards: Shards) -> Any:
        """Run as many chunks as all ranks do, whose parts FSDP2 shards."""
        if self.by_tokens is not None:
            raise TrainkitError(
                f"{self.name}: parts of it are sharded by FSDP2, whose ranks need "
                f"equally many chunks, and a budget of tokens gives each rank its own "
                f"number. Cut by size= alone."
            )
        wants = self._plans.wants_probe(call)
        number, probes = shards.agreed(self.sizes, call.rows, probes=wants)
        sizes = FixedNumber(number)
        if not self._cuts(sizes, call):
            return call.run(call.values)
        with shards.probing() if probes else contextlib.nullcontext():
            plan = self._plans.find(
                call, self.sizes.limit, self.around, probes=probes, is_sharded=True
            )
        return run_in_chunks(self._call(call, plan, sizes, shards=shards))

    def _by_tokens(self, call: Arguments) -> Any:
        """Run rows of like length together."""
        assert self.by_tokens is not None
        if call.rows <= 1:
            return call.run(call.values)
        ordered = self.by_tokens.sort(call, self.name)
        self._padding.read()  # the device has been waited for
        sizes = Blocks(ordered.runs, ordered.columns)
        if not self._cuts(sizes, call):
            return call.run(call.values)
        plan = self._plans.find(call, self.sizes.limit, self.around)
        values, options = ordered.values(call.values, plan), {}
        if ordered.is_trimmed:
            key = self._plans.key(call)
            with refusing(self.module, self.name, call), self.around(None, None):
                plan = self.by_tokens.plan(
                    plan, key, call.run, values, ordered, self.module, self._draws
                )
            options = {"padding": self._padding, "width": ordered.width}
        call = replace(call, values=values)
        return run_in_chunks(
            self._call(call, plan, sizes, **options),
            lambda leaves: ordered.restored(leaves, plan),
        )

    def probe(self, *args: Any, **kwargs: Any) -> list[str]:
        """Refuse a module that cannot run in chunks, as one call of it shows; return
        what a user would be warned of."""
        _refuse_module(self.module, self.name)
        call, coupling = self._read(args, kwargs), self.coupling
        apart = contextlib.nullcontext()
        if coupling is not None:
            apart = coupling.uncoupled(self.module)
        with apart:
            self._plans.probe(
                call, self.sizes.limit, self.around, is_coupled=coupling is not None
            )
        return self._plans.announced

    def _read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        original, module = self._original(), self.module
        fields, build = take_apart((args, kwargs))

        values = [each.value for each in fields]
        is_flat = len(values) == len(args) and all(map(is_, values, args))

        def run(given: list[Any]) -> Any:
            if is_flat and not self._plans.is_probing:
                with _without_cache(module):
                    return original(*given, **kwargs)
            watched = Watched(given) if self._plans.is_probing else None
            positional, named = build(iter(given))
            with _without_cache(module):
                found = original(*positional, **named)
            if watched is not None:
                self._plans.written |= watched.changed((positional, named), found)
            return found

        paths = [self._names.path(each.path) for each in fields]
        shared = {i for i, path in enumerate(paths) if self._is_shared(path)}
        rows = num_rows(values, paths, shared, self._plans.with_rows)
        if rows == 1:
            refuse_layouts(values, paths, shared, self.name)
        return Arguments(run, values, paths, shared, rows)

    def __getstate__(self) -> dict[str, Any]:
        """A copy begins anew: what it has seen holds graphs."""
        return vars(self) | {
            "_check": Check(),
            "around": _nothing,
            "shares": no_shares,
            "is_copy": True,
        }

    def _original(self) -> Any:
        if self._before is not None:
            return self._before
        return type(self.module).forward.__get__(self.module)

    def _is_shared(self, path: str) -> bool:
        parts = path.split(".")
        return any(".".join(parts[: n + 1]) in self._shared for n in range(len(parts)))


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


def _remove_copied(module: nn.Module) -> None:
    """Give a copy of a module that ran in chunks its own forward back."""
    forward = vars(module).get("forward")
    if isinstance(forward, ChunkedForward) and forward.is_copy:
        forward.remove()


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
