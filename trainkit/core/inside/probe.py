"""Runs of a module on a few rows, which show whether it can run in chunks."""

from __future__ import annotations

import contextlib
import gc
import pickle
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from trainkit.core._compat import Drawn, without_gradient_hooks
from trainkit.core.batch_norm.layers import listed
from trainkit.core.inside.checks import leaves_of
from trainkit.core.inside.draws import (
    Draws,
    are_same,
    put_back_on_host,
    states_of_host,
    torch_states,
)
from trainkit.core.inside.left_behind import held_values, moved_between
from trainkit.core.inside.moment import version_of
from trainkit.core.inside.rows import (
    Unfit,
    refuse_kind,
)
from trainkit.core.inside.settings import Settings, changed, settings_of
from trainkit.core.nested import Field, take_apart

REENTRANT = "CheckpointFunctionBackward"


class Probe:
    """Runs a module on some rows, always with the same draws.

    Args:
        module: which runs.
        run: its forward, on a list of arguments.
        values: the arguments of the call that is probed.
        draws: keeps random states.

    Attributes:
        has_drawn: whether the last run drew random numbers.
        draws_in_training: whether any run in the module's own modes did.
        may_reenter: whether chunks may hold reentrant checkpoints.
        row_bytes: what the graph of a row holds.
        leaves: what the last graph trains.
        left: the attributes in which a run left other values than the one before.
        moved: those among them that are numbers or words.
        eps: the coarsest rounding of what graphs have saved.
        foreign: the leaves that the last two graphs have in common and that are no
            arguments.
    """

    def __init__(
        self,
        module: nn.Module,
        run: Callable[[list[Any]], Any],
        values: Sequence[Any],
        draws: Draws,
    ) -> None:
        self._module, self._run, self._draws = module, run, draws
        tensors = [(i, v) for i, v in enumerate(values) if isinstance(v, Tensor)]
        self._devices = {each.device for _, each in tensors}
        self._trained = [i for i, each in tensors if each.requires_grad]
        self._has_graph = torch.is_grad_enabled()
        draws.look(module)
        self._torch = draws.keep(self._devices)
        self._host = states_of_host()
        self.has_drawn = self.draws_in_training = self.may_reenter = False
        self.row_bytes, self.eps = 0, 0.0
        self.leaves: list[Tensor] = []
        self._attributes: dict[str, Any] | None = None
        self._settings: Settings | None = None
        self.left: set[str] = set()
        self.moved: set[tuple[nn.Module, str]] = set()
        self.foreign: list[Tensor] = []

    def __call__(
        self, given: list[Any], *, rows_with_graph: int = 0, evaluates: bool = False
    ) -> list[Field]:
        self.put_back()
        tensors = [each for each in given if isinstance(each, Tensor)]
        versions = [version_of(each) for each in tensors]
        before = torch_states(self._devices)
        if rows_with_graph and self._has_graph:
            fields = self._with_graph(given, rows_with_graph)
        else:
            with torch.no_grad(), _in_evaluation(self._module, evaluates):
                fields = take_apart(self._run(given))[0]
        if versions != [version_of(each) for each in tensors]:
            raise Unfit("it changes its arguments in place")
        self._note_left()
        self._note_draws(before)
        self.draws_in_training |= self.has_drawn and not evaluates
        return fields

    def _note_left(self) -> None:
        left, numbers = held_values(self._module), settings_of(self._module)
        if self._attributes is not None and self._settings is not None:
            self.left |= moved_between(self._attributes, left)
            self.moved |= changed(self._settings, numbers)
        self._attributes, self._settings = left, numbers

    # ---- what is compared ------------------------------------------------------------

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those that train."""
        return [each for each in self._module.parameters() if each.requires_grad]

    @property
    def draws_backward(self) -> bool:
        """Whether a backward pass draws random numbers."""
        return self._draws.of_backward

    def leaves_of(self, given: list[Any]) -> list[Tensor]:
        """The arguments that train, each a leaf of its own from now on."""
        for index in self._trained:
            given[index] = given[index].detach().requires_grad_()
        return [given[index] for index in self._trained]

    @contextlib.contextmanager
    def graph(
        self, given: Callable[[], list[Any]], *, evaluates: bool
    ) -> Iterator[list[Any]]:
        """The outputs with their graph. Within it, a backward pass finds the module as
        it was, and shows whether it draws random numbers.

        Args:
            given: makes the arguments.
            evaluates: whether to run in evaluation mode.
        """
        self.put_back()
        before = torch_states(self._devices)
        with (
            without_gradient_hooks(self.parameters),
            _in_evaluation(self._module, evaluates),
        ):
            with torch.enable_grad(), saved_tensors_hooks(self._kept, _itself):
                fields = take_apart(self._run(given()))[0]
            self._note_draws(before)
            behind = torch_states(self._devices)
            yield [each.value for each in fields]
        is_quiet = are_same(behind, torch_states(self._devices))
        self._draws.of_backward |= not is_quiet

    def _kept(self, tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            self.eps = max(self.eps, torch.finfo(tensor.dtype).eps)
        return tensor.detach()

    def _note_draws(self, before: Sequence[Tensor]) -> None:
        self._draws.note(self._host)
        draws = self._draws.of_host or bool(self._draws.own)
        self.has_drawn = draws or not are_same(before, torch_states(self._devices))

    def drawn(self, given: list[Any]) -> dict[str, Any]:
        """What a run draws at random: how often, by operator and shape; for generators
        of the host, their state behind it."""
        self.put_back()
        with torch.no_grad(), Drawn() as found:
            self._run(given)
        found_all: dict[str, Any] = dict(found.counts)
        pairs = zip(
            ("random", "numpy.random"), states_of_host(), self._host, strict=True
        )
        for name, after, before in pairs:
            if (state := pickle.dumps(after)) != pickle.dumps(before):
                found_all[name] = state
        return found_all

    def put_back(self) -> None:
        """Put all random states back to where they were."""
        self._torch()
        put_back_on_host(self._host)

    def _with_graph(self, given: list[Any], num_rows: int) -> list[Field]:
        given = list(given)
        for index in self._trained:
            given[index] = given[index].detach().requires_grad_()
        held: list[weakref.ref[_Held]] = []

        sizes: dict[int, int] = {}

        def pack(tensor: Tensor) -> _Held:
            if not isinstance(tensor, nn.Parameter) and _has_storage(tensor):
                store = tensor.untyped_storage()
                sizes[store.data_ptr()] = store.nbytes()
            found = _Held(tensor.detach())
            held.append(weakref.ref(found))
            return found

        with torch.enable_grad():
            try:
                with saved_tensors_hooks(pack, lambda held: held.tensor):
                    fields = take_apart(self._run(given))[0]
            except RuntimeError as error:
                if not is_no_place_for_hooks(error):
                    raise
                held.clear()
                fields = take_apart(self._run(given))[0]
        self.row_bytes = sum(sizes.values()) // num_rows
        try:
            refused = "" if self.may_reenter else REENTRANT
            leaves = leaves_of([each.value for each in fields], refused=refused)
        except LookupError:
            raise Unfit(
                "it has activation checkpoints with use_reentrant=True, which torch "
                "does not let run within another backward pass. Write "
                "use_reentrant=False"
            ) from None
        again, own = {id(each) for each in self.leaves}, {id(each) for each in given}
        self.foreign = [each for each in leaves if id(each) in again - own]
        self.leaves = leaves
        fields = [Field(path, _plain(value)) for path, value in fields]
        self._refuse_held(held, [f for f in fields if not isinstance(f.value, Tensor)])
        return fields

    def _refuse_held(
        self, held: Sequence[weakref.ref[Any]], fields: Sequence[Field]
    ) -> None:
        """Refuse a graph that outlives the outputs: the loss may depend on it, or the
        next chunk, which has none."""
        names = [
            f"{path}.{name}" if path else name
            for path, each in self._module.named_modules()
            for name, value in vars(each).items()
            if isinstance(value, Tensor) and value.grad_fn is not None
        ]
        if not names and not _are_alive(held):
            return
        for path, value in fields:
            if hasattr(value, "__dict__") or isinstance(value, Collection):
                refuse_kind(path, value)
        where = listed(names) if names else "a list, a hook or a cache"
        raise Unfit(
            f"its forward leaves tensors with a gradient in {where}, where each chunk "
            f"overwrites those of the one before. Return them as outputs, or detach() "
            f"them"
        )


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


def is_no_place_for_hooks(error: RuntimeError) -> bool:
    """Whether functions of torch.func have refused what a probe adds to a graph."""
    return any(word in str(error) for word in ("saved tensor hooks", "functorch"))


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _has_storage(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def _plain(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


@contextlib.contextmanager
def _in_evaluation(module: nn.Module, is_on: bool) -> Iterator[None]:
    modes = [(each, each.training) for each in module.modules()] if is_on else []
    for each, _ in modes:
        each.training = False
    try:
        yield
    finally:
        for each, mode in modes:
            each.training = mode
