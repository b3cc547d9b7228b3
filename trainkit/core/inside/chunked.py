"""The inner cut: a module whose forward runs in chunks of rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.core.batch_norm.layers import listed, normalising_by_batch
from trainkit.core.batches import Path
from trainkit.core.inside.arguments import Arguments, argument_names
from trainkit.core.inside.call import Around, Call, Cut, run_in_chunks
from trainkit.core.inside.checks import Check, foreign_leaves
from trainkit.core.inside.chunks import Sizes, are_same
from trainkit.core.inside.draws import Draws, torch_states
from trainkit.core.inside.keep import Keep, Keeper
from trainkit.core.inside.left_behind import (
    announce_hooks,
    held_tensors,
    moved_between,
)
from trainkit.core.inside.moment import Moment
from trainkit.core.inside.padding import PaddingCheck
from trainkit.core.inside.rows import (
    Plan,
    Unfit,
    multiples_of,
    num_rows,
    settle,
    taken,
)
from trainkit.core.inside.sharded import FixedNumber, refuse_flat, shards_within
from trainkit.core.inside.tokens import Blocks, ByTokens
from trainkit.core.split.fields import take_apart
from trainkit.core.whole_number import check_whole_number
from trainkit.errors import TrainkitError

NUM_PROBES = 2
"""How often the rows of one kind of call are looked at."""


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
        self.is_off = False
        self._shared = {str(path) for path in shared}
        self._before = vars(module).get("forward")
        self._names = argument_names(self._original())
        self._draws, self._check = Draws(), Check()
        self.by_tokens, self._padding = by_tokens, PaddingCheck()
        self._plans: dict[Any, tuple[Plan, int]] = {}

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

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        original, module = self._original(), self.module
        is_evaluation = not module.training and not torch.is_grad_enabled()
        if self.is_off or is_evaluation:
            return original(*args, **kwargs)
        call = self._read(args, kwargs)
        shards = shards_within(module, self.name, self.keeper.keep)
        key = self._key(call)
        plan, times = self._plans.get(key, (None, 0))
        probes, sizes, ordered = times < NUM_PROBES, self.sizes, None
        if shards is not None:
            self._refuse_tokens()
            number, probes = shards.agreed(sizes, call.rows, probes=probes)
            sizes = FixedNumber(number)
        elif self.by_tokens is not None and call.rows > 1:
            ordered = self.by_tokens.sort(call, self.name)
            sizes = Blocks(ordered.runs, ordered.columns)
        is_one = not sizes.is_auto and len(sizes.cut(0, call.rows)) == 1
        if call.rows <= 1 or is_one:
            return original(*args, **kwargs)
        if plan is None or probes:
            with nullcontext() if shards is None else shards.probing():
                plan = self._probe(call)
            self._plans[key] = plan, times + 1
        cut = Cut(
            module,
            call.run,
            self.name,
            sizes,
            self._draws,
            self._check,
            self.keeper,
            self.around,
            shards,
        )
        number = self.keeper.begin(call.devices) if shards is None else 0
        if self.by_tokens is None or ordered is None:
            return run_in_chunks(Call(cut, plan, call.values, call.rows, number))
        values = ordered.values(call.values, plan)
        if ordered.is_trimmed:
            with self._refusing(call), self.around(None, None):
                plan = self.by_tokens.plan(
                    plan, key, call.run, values, ordered, module, self._draws
                )
            cut = replace(cut, padding=self._padding, width=ordered.width)
        return run_in_chunks(
            Call(cut, plan, values, call.rows, number),
            lambda leaves: ordered.restored(leaves, plan),
        )

    def _refuse_tokens(self) -> None:
        if self.by_tokens is not None:
            raise TrainkitError(
                f"{self.name}: parts of it are sharded by FSDP2, whose ranks need "
                f"equally many chunks, and a budget of tokens gives each rank its own "
                f"number. Cut by size= alone."
            )

    def probe(self, *args: Any, **kwargs: Any) -> None:
        """Refuse a module that cannot run in chunks, as one call of it shows."""
        _refuse_module(self.module, self.name)
        self._probe(self._read(args, kwargs))

    def _read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        fields, build = take_apart((args, kwargs))
        original = self._original()

        def run(given: list[Any]) -> Any:
            positional, named = build(iter(given))
            return original(*positional, **named)

        paths = [self._path(each.path) for each in fields]
        shared = {i for i, path in enumerate(paths) if self._is_shared(path)}
        values = [each.value for each in fields]
        return Arguments(run, values, paths, shared, num_rows(values, shared))

    def _original(self) -> Any:
        if self._before is not None:
            return self._before
        return type(self.module).forward.__get__(self.module)

    # ---- which arguments have rows ---------------------------------------------------

    def _key(self, call: Arguments) -> Any:
        """What a call has in common with others that are cut alike."""
        multiples = multiples_of(call.values, max(call.rows, 1), call.shared)
        kinds = [
            (value.ndim, multiple) if isinstance(value, Tensor) else type(value)
            for value, multiple in zip(call.values, multiples, strict=True)
        ]
        return self.module.training, *call.paths, *kinds

    def _probe(self, call: Arguments) -> Plan:
        """Run a few rows, to see that they do not see each other."""
        if found := normalising_by_batch(self.module):
            names = [name or "the module itself" for name in found]
            raise TrainkitError(
                f"{self.name}: its rows must not see each other, and BatchNorm "
                f"normalises by all rows of a batch: {listed(names)}. Freeze it, use "
                f'BatchNormGuard("group_norm"), or name a module without it.'
            )
        refuse_flat(self.module, self.name)
        if not self._plans:
            announce_hooks(self.module, self.name)
        devices = call.devices
        moment = Moment(self.module, self.name, devices)
        note = self._draws.look(self.module)
        put_back, states = self._draws.keep(devices), torch_states(devices)

        held: list[dict[str, Any]] = []

        def again(given: list[Any]) -> Any:
            put_back()
            tensors = [each for each in given if isinstance(each, Tensor)]
            versions = [each._version for each in tensors]
            with self.around(None, None):
                output = call.run(given)
            if versions != [each._version for each in tensors]:
                raise Unfit("it changes its arguments in place")
            held[:] = [*held[-1:], held_tensors(self.module)]
            if len(held) > 1 and (left := moved_between(*held)):
                raise Unfit(
                    f"its forward leaves tensors in {listed(left)}, which would hold "
                    f"those of one chunk; return them instead"
                )
            return output

        try:
            with self._refusing(call):
                if call.rows <= 1:
                    raise Unfit("none of its arguments has rows")
                with torch.no_grad():
                    plan = settle(
                        again,
                        call.values,
                        call.rows,
                        call.shared,
                        lambda: not are_same(states, torch_states(devices)),
                    )
                note()
                moment.check_state()
                if torch.is_grad_enabled():
                    self._refuse_foreign(again, plan, call)
        finally:
            put_back()
            if torch.is_autocast_cache_enabled():
                torch.clear_autocast_cache()
        return plan

    @contextmanager
    def _refusing(self, call: Arguments) -> Iterator[None]:
        try:
            yield
        except Unfit as error:
            raise TrainkitError(
                f"{self.name}: it cannot run in chunks of rows: {error}. Its arguments "
                f"are {listed(call.paths, at_most=9)}, of {call.rows} rows. Name a "
                f"module within it or around it, or list in shared= the arguments that "
                f"all rows need."
            ) from error

    def _refuse_foreign(self, again: Any, plan: Plan, call: Arguments) -> None:
        pairs, ends = zip(call.values, plan.multiples, strict=True), [0, call.rows - 1]
        given = [taken(x, ends, m, call.rows) if m else x for x, m in pairs]
        given = [
            x.detach().requires_grad_()
            if isinstance(x, Tensor) and x.requires_grad
            else x
            for x in given
        ]
        own = [x for x in given if isinstance(x, Tensor)]
        foreign = foreign_leaves(
            lambda: again(given), [*self.module.parameters(), *own]
        )
        refuse_flat(self.module, self.name, foreign)
        if foreign:
            shapes = ", ".join(str(list(each.shape)) for each in foreign)
            raise TrainkitError(
                f"{self.name}: what trains must be a parameter of it or an argument, "
                f"and its output depends on a tensor of shape {shapes} that is "
                f"neither, and would get no gradient. Pass it as an argument, or make "
                f"it a parameter of this module."
            )

    def _path(self, path: str) -> str:
        """An argument's path as a user writes it: by name, or by its place."""
        kind, _, rest = path.partition(".")
        if kind == "1":
            return rest
        place, dot, inner = rest.partition(".")
        index = int(place) if place else 0
        name = self._names[index] if index < len(self._names) else place
        return f"{name}{dot}{inner}"

    def _is_shared(self, path: str) -> bool:
        parts = path.split(".")
        return any(".".join(parts[: n + 1]) in self._shared for n in range(len(parts)))


class Chunked(nn.Module):
    """A module that runs in chunks of rows, and whose gradient is the whole batch's.

        with Chunked(model.encoder, size=32):
            loss = contrastive(model(batch))
            loss.backward()

    The module itself is cut: where it is called, the rows of its arguments run `size`
    at a time, without a graph, and once more with one in the backward pass. What calls
    it sees all rows at once, so that any loss is the loss of the whole batch. `remove`,
    or the end of the `with` block, gives the module its own forward back.

    This object has the module's parameters under their own names, and can be called in
    its place.

    Args:
        module: whose rows do not see each other.
        size: the most rows in a chunk; None: as many as fit in memory.
        tokens: the most tokens in a chunk. Rows of like length then run together,
            without the columns that are padding in all of them. The outputs are 0
            there, and the loss must give padding no weight.
        lengths: the name of the argument that tells rows from padding, a mask or whole
            numbers; default: `"attention_mask"`.
        keep: how many chunks keep their graph and need no second pass: a number, the
            bytes that they may take (`"2GB"`), or `"auto"`.
        shared: names of the arguments that every chunk gets whole.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        size: int | None = None,
        tokens: int | None = None,
        lengths: str | None = None,
        keep: Keep = "auto",
        shared: Sequence[Path] = (),
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise TrainkitError(
                f"Chunked: must be given a torch module, received "
                f"{type(module).__name__}."
            )
        if size is not None:
            check_whole_number("Chunked size", size)
        name = f"Chunked({type(module).__name__})"
        if lengths is not None and tokens is None:
            raise TrainkitError(
                f"{name}: lengths={lengths!r} is for a budget of tokens, and none was "
                f"given. Add tokens=, or leave out lengths."
            )
        by_tokens = None if tokens is None else ByTokens(tokens, lengths, size)
        self._cut = ChunkedForward(
            module, name, Sizes(size), Keeper(keep), shared, by_tokens
        )
        self._cut.install()
        for held in ("_parameters", "_buffers", "_modules"):
            vars(self)[held] = vars(module)[held]
        self.training = module.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._cut.module(*args, **kwargs)

    def train(self, mode: bool = True) -> Chunked:
        self.training = mode
        self._cut.module.train(mode)
        return self

    def remove(self) -> None:
        """Give the module its own forward back."""
        self._cut.remove()

    def __enter__(self) -> nn.Module:
        return self._cut.module

    def __exit__(self, *error: Any) -> None:
        self.remove()


def _nothing(call: Any, chunk: Any) -> AbstractContextManager[None]:
    return nullcontext()


def _refuse_module(module: nn.Module, name: str) -> None:
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
