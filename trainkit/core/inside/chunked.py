"""The inner cut: a module whose forward runs in chunks of rows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trainkit.core._compat import uncompiled
from trainkit.core.batch_norm.layers import listed, normalising_by_batch
from trainkit.core.batches import Path
from trainkit.core.inside.call import Around, Call, Cut, run_in_chunks
from trainkit.core.inside.checks import Check, refuse_strangers, strangers
from trainkit.core.inside.chunks import Sizes
from trainkit.core.inside.draws import Draws
from trainkit.core.inside.keep import Keep, Keeper
from trainkit.core.inside.left_behind import announce_left
from trainkit.core.inside.moment import Moment
from trainkit.core.inside.names import Names, kinds_of, refuse_layouts
from trainkit.core.inside.probe import Probe
from trainkit.core.inside.rows import Plan, Unfit, multiples_of, num_rows, settle
from trainkit.core.split.fields import take_apart
from trainkit.core.whole_number import check_whole_number
from trainkit.errors import TrainkitError

NUM_PROBES = 2
"""How often the rows of one kind of call are looked at."""

MOST_PLANS = 99
"""How many kinds of calls are remembered."""

SHARED = (
    "_parameters",
    "_buffers",
    "_modules",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
"""What a `Chunked` has in common with its module."""


@dataclass
class Arguments:
    """The arguments of a call, taken apart.

    Attributes:
        run: the module's own forward, on a list of values.
        values: the arguments.
        paths: of them, as a user writes them.
        shared: the indices of those that every chunk gets whole.
        rows: how many rows they have.
    """

    run: Callable[[list[Any]], Any]
    values: list[Any]
    paths: list[str]
    shared: set[int]
    rows: int


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
    ) -> None:
        self.module, self.name = module, name
        self.sizes, self.keeper = sizes, keeper
        self.around: Around = _nothing
        self.is_off = False
        self._shared = {str(path) for path in shared}
        self._before = vars(module).get("forward")
        self._names = Names(self._original())
        self._names.check(self._shared, name)
        self._draws, self._check = Draws(), Check()
        self._plans: dict[Any, tuple[Plan, int]] = {}
        self._with_rows: set[str] = set()

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
        call = self._read(args, kwargs)
        limit = call.rows if self.sizes.limit is None else self.sizes.limit
        if call.rows <= 1 or (call.rows <= limit and not self.sizes.is_auto):
            return original(*args, **kwargs)
        plan = self._plan(call)
        cut = Cut(
            module,
            call.run,
            self.name,
            self.sizes,
            self._draws,
            self._check,
            self.keeper,
            self.around,
        )
        return run_in_chunks(Call(cut, plan, call.values, call.rows))

    def probe(self, *args: Any, **kwargs: Any) -> None:
        """Refuse a module that cannot run in chunks, as one call of it shows."""
        _refuse_module(self.module, self.name)
        self._probe(self._read(args, kwargs))

    def _read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        original, module = self._original(), self.module
        fields, build = take_apart((args, kwargs))

        def run(given: list[Any]) -> Any:
            positional, named = build(iter(given))
            with _without_cache(module):
                return original(*positional, **named)

        values = [each.value for each in fields]
        paths = [self._names.path(each.path) for each in fields]
        shared = {i for i, path in enumerate(paths) if self._is_shared(path)}
        rows = num_rows(values, paths, shared, self._with_rows)
        if rows == 1:
            refuse_layouts(values, paths, shared, self.name)
        return Arguments(run, values, paths, shared, rows)

    def __getstate__(self) -> dict[str, Any]:
        """A copy begins anew: what it has seen holds generators and graphs."""
        begun = {"_draws": Draws(), "_check": Check(), "_plans": {}}
        return vars(self) | begun

    def _original(self) -> Any:
        if self._before is not None:
            return self._before
        return type(self.module).forward.__get__(self.module)

    # ---- which arguments have rows ---------------------------------------------------

    def _plan(self, call: Arguments) -> Plan:
        key = self._key(call)
        plan, times = self._plans.get(key, (None, 0))
        if plan is None or times < NUM_PROBES:
            plan = self._probe(call)
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

    def _probe(self, call: Arguments) -> Plan:
        """Run a few rows, to see that they do not see each other."""
        if found := normalising_by_batch(self.module):
            names = [name or "the module itself" for name in found]
            raise TrainkitError(
                f"{self.name}: its rows must not see each other, and BatchNorm "
                f"normalises by all rows of a batch: {listed(names)}. Freeze it, use "
                f'BatchNormGuard("group_norm"), or name a module without it.'
            )
        tensors = [each for each in call.values if isinstance(each, Tensor)]
        moment = Moment(self.module, self.name, {each.device for each in tensors})

        def run(given: list[Any]) -> Any:
            with self.around(None, None):
                return call.run(given)

        probe = Probe(self.module, run, call.values, self._draws)
        try:
            if call.rows <= 1:
                raise Unfit("none of its arguments has rows")
            plan = settle(
                probe, call.values, call.rows, call.shared, most=self.sizes.limit
            )
            moment.check_state()
            self.keeper.row_bytes = max(self.keeper.row_bytes, probe.row_bytes)
            refuse_strangers(strangers(probe.foreign, moment.parameters), self.name)
            if not self._plans:
                announce_left(self.module, self.name, probe.left)
        except Unfit as error:
            moment.check_state()  # what moves is why rows seem to see each other
            raise TrainkitError(
                f"{self.name}: it cannot run in chunks of rows: {error}. Its arguments "
                f"are {listed(call.paths, at_most=9)}, of {call.rows} rows. Name a "
                f"module within it or around it, or list in shared= the arguments that "
                f"all rows need."
            ) from error
        finally:
            probe.put_back()
            if torch.is_autocast_cache_enabled():
                torch.clear_autocast_cache()
        pairs = zip(call.paths, plan.multiples, strict=True)
        self._with_rows |= {path for path, multiple in pairs if multiple}
        return plan

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

    Forward hooks on the module run once; those on modules within it run for each chunk,
    and again in the backward pass. The `use_cache` of a model of transformers is off
    while it runs in chunks: pass `use_cache=True` and it is refused. Lists of samples
    are not cut: every chunk gets the whole list.

    This object has the module's parameters under their own names, and can be called in
    its place.

    Args:
        module: whose rows do not see each other.
        size: the most rows in a chunk; None: as many as fit in memory.
        keep: how many chunks keep their graph and need no second pass: a number, the
            bytes that they may take (`"2GB"`), or `"auto"`.
        shared: names of the arguments that every chunk gets whole.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        size: int | None,
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
        self._cut = ChunkedForward(module, name, Sizes(size), Keeper(keep), shared)
        self._cut.install()
        for held in SHARED:
            vars(self)[held] = vars(module)[held]
        self.training = module.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._cut.module(*args, **kwargs)

    def _save_to_state_dict(self, *args: Any) -> None:  # pyright: ignore
        self._cut.module._save_to_state_dict(*args)

    def _load_from_state_dict(self, *args: Any) -> None:  # pyright: ignore
        self._cut.module._load_from_state_dict(*args)

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
