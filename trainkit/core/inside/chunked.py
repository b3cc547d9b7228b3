"""The inner cut: a module whose forward runs in chunks of rows."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from inspect import Parameter
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.core.batch_norm.layers import listed, normalising_by_batch
from trainkit.core.batches import Path
from trainkit.core.inside.call import Call, Cut, run_in_chunks
from trainkit.core.inside.checks import Check, foreign_leaves
from trainkit.core.inside.chunks import Sizes
from trainkit.core.inside.draws import Draws
from trainkit.core.inside.keep import Keep, Keeper
from trainkit.core.inside.moment import Moment
from trainkit.core.inside.rows import (
    Plan,
    Unfit,
    multiples_of,
    num_rows,
    settle,
    taken,
)
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
        self._shared = {str(path) for path in shared}
        self._before = vars(module).get("forward")
        self._names = _argument_names(self._original())
        self._draws, self._check = Draws(), Check()
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
        if not module.training and not torch.is_grad_enabled():
            return original(*args, **kwargs)  # an evaluation
        fields, build = take_apart((args, kwargs))
        values = [each.value for each in fields]
        paths = [self._path(each.path) for each in fields]
        shared = {i for i, path in enumerate(paths) if self._is_shared(path)}
        rows = num_rows(values, shared)
        limit = rows if self.sizes.limit is None else self.sizes.limit
        if rows <= 1 or (rows <= limit and not self.sizes.is_auto):
            return original(*args, **kwargs)

        is_flat = len(values) == len(args) and all(map(is_, values, args))

        def run(given: list[Any]) -> Any:
            if is_flat:
                return original(*given, **kwargs)
            positional, named = build(iter(given))
            return original(*positional, **named)

        plan = self._plan(run, values, paths, rows, shared)
        number = self.keeper.begin({x.device for x in values if isinstance(x, Tensor)})
        cut = Cut(
            module, run, self.name, self.sizes, self._draws, self._check, self.keeper
        )
        return run_in_chunks(Call(cut, plan, values, rows, number))

    def _original(self) -> Any:
        if self._before is not None:
            return self._before
        return type(self.module).forward.__get__(self.module)

    # ---- which arguments have rows ---------------------------------------------------

    def _plan(
        self, run: Any, values: list[Any], paths: list[str], rows: int, shared: set[int]
    ) -> Plan:
        key = (
            self.module.training,
            *(
                (path, value.ndim, multiple)
                if isinstance(value, Tensor)
                else (path, type(value))
                for path, value, multiple in zip(
                    paths, values, multiples_of(values, rows, shared), strict=True
                )
            ),
        )
        plan, times = self._plans.get(key, (None, 0))
        if plan is None or times < NUM_PROBES:
            plan = self._probe(run, values, paths, rows, shared)
            self._plans[key] = plan, times + 1
        return plan

    def _probe(
        self, run: Any, values: list[Any], paths: list[str], rows: int, shared: set[int]
    ) -> Plan:
        """Run a few rows, to see that they do not see each other."""
        if names := normalising_by_batch(self.module):
            raise TrainkitError(
                f"{self.name}: its rows must not see each other, and BatchNorm "
                f"normalises by all rows of a batch: {listed(names)}. Freeze it, use "
                f'BatchNormGuard("groupnorm"), or name a module without it.'
            )
        devices = {each.device for each in values if isinstance(each, Tensor)}
        moment = Moment(self.module, self.name, devices)
        note = self._draws.look(self.module)
        put_back = self._draws.keep(devices)

        def again(given: list[Any]) -> Any:
            put_back()
            tensors = [each for each in given if isinstance(each, Tensor)]
            versions = [each._version for each in tensors]
            output = run(given)
            if versions != [each._version for each in tensors]:
                raise Unfit("it changes its arguments in place")
            return output

        try:
            with torch.no_grad():
                plan = settle(again, values, rows, shared)
            note()
            moment.check_state()
            if torch.is_grad_enabled():
                self._refuse_foreign(again, plan, values, rows)
        except Unfit as error:
            raise TrainkitError(
                f"{self.name}: it cannot run in chunks of rows: {error}. Its arguments "
                f"are {listed(paths, at_most=9)}, of {rows} rows. Name a module within "
                f"it or around it, or list in shared= the arguments that all rows need."
            ) from error
        finally:
            put_back()
            if torch.is_autocast_cache_enabled():
                torch.clear_autocast_cache()
        return plan

    def _refuse_foreign(
        self, again: Any, plan: Plan, values: list[Any], rows: int
    ) -> None:
        pairs = zip(values, plan.multiples, strict=True)
        given = [taken(x, [0, rows - 1], m, rows) if m else x for x, m in pairs]
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


def _argument_names(function: Any) -> list[str]:
    """The names of a function's positional arguments."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    by_place = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    return [each.name for each in parameters if each.kind in by_place]


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
