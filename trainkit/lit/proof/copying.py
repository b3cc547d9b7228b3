"""Copies for a rehearsal, of a module and of what rows are read with: what is thrown
away needs no putting back."""

from __future__ import annotations

import contextlib
import copy
import functools
import types
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    default_collate,
)

from trainkit.core.generators import is_generator, random_kept
from trainkit.core.nested import take_apart
from trainkit.lit.probe.rows import rows_at
from trainkit.lit.proof.report import NotMeasured, in_one_line

LARGE = 2**18
"""Frozen parameters of more entries are shared with a copy, and must not be written."""

SPREAD = 0.05
"""How far weights are moved, as a share of their spread."""

LEAST_MOVE = 0.02
"""How far weights are moved that are all alike, as at zero or at one."""

MOST_PARTS = 20
"""Longer lists hold data, which is shared."""

SHARED = (DataLoader, Dataset, Sampler, types.ModuleType, ContextVar)
"""Kinds that a copy holds as they are; `torch.compile(dynamic=True)` has the last."""

EMPTY = object()
"""What is in a cell that nothing was put in."""

_OURS = "trainkit.lit."
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class Copies:
    """Copies a module and what belongs to it, as `copy.deepcopy` does, but for a few.

    The Trainer is left out. Data sets, loaders, large frozen parameters and what was
    imported are shared.
    Tensors that hang on a graph are copied without it. Functions that close over
    something, as hooks often do over their module, close over its copy.

    Args:
        trainer: to which the module is attached.
        module: is copied.
        shares: whether large frozen parameters are shared.
        dtype: that of the rehearsal, which writes all else into the copy; what has
            another one is copied.

    Attributes:
        module: the copy.
        shared: the shared parameters, by the address of their memory.
    """

    def __init__(
        self,
        trainer: Any,
        module: nn.Module,
        *,
        shares: bool = True,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        _refuse(module)
        self.shared: dict[int, str] = {}
        self._memo: dict[int, Any] = {}
        self._seen: dict[int, Any] = {}
        self._functions: list[tuple[Any, Any]] = []
        compiled = self._leave_out(trainer, module)
        for name, parameter in module.named_parameters():
            stays = parameter.dtype == dtype or not parameter.is_floating_point()
            is_large = not parameter.requires_grad and parameter.numel() > LARGE
            if shares and stays and is_large:
                self._memo[id(parameter)] = parameter
                self.shared[parameter.untyped_storage().data_ptr()] = name
        for each in module.modules():
            self._prepare(vars(each))
        self.module: Any = self.of(module, type(module).__name__)
        for name in compiled:  # by Lightning: a copy runs as it was written
            vars(self.module).pop(name, None)
        self._copy_hooks(module)
        _remove_our_hooks(self.module)

    def of(self, value: Any, name: str) -> Any:
        """A copy of something that may refer to the module."""
        self._prepare(value)
        before = dict(self._memo)
        try:
            copied = copy.deepcopy(value, self._memo)
            while self._functions:
                self._fill(*self._functions.pop())
        except Exception as error:
            place, kind = _culprit(value, before, name)
            raise NotMeasured(
                f"{place} ({kind}) cannot be copied: {in_one_line(error)}"
            ) from error
        return copied

    def move_generators(self) -> None:
        """Let Python's and NumPy's generators that the module holds draw once."""
        for key in filter(self._memo.__contains__, self._seen):
            copied = self._memo[key]
            if is_generator(copied) and hasattr(copied, "random"):  # not torch's
                copied.random()

    def _leave_out(self, trainer: Any, module: nn.Module) -> list[str]:
        """Leave out what belongs to the run; returns which methods are compiled."""
        compiled = vars(module).get("_compiler_ctx")
        names = [n.removeprefix("original_") for n in compiled or () if "_" in n]
        held = [vars(each).get("_trainer") for each in module.modules()]
        held += [vars(each).get("_fabric") for each in module.modules()]
        held += [trainer, trainer.strategy, *trainer.loggers, compiled]
        held += [vars(module).get(name) for name in names]
        # Which metric stands where, by identity: a copy looks again.
        held.append(vars(module).get("_metric_attributes"))
        self._memo.update({id(each): None for each in held})
        self._memo[id(trainer.datamodule)] = trainer.datamodule
        return names

    def _prepare(self, value: Any) -> None:
        """Say how what a value holds is copied, where deepcopy does otherwise."""
        if id(value) in self._seen or id(value) in self._memo:
            return
        self._seen[id(value)] = value
        if isinstance(value, Tensor) and not value.is_leaf:
            kept = value.detach().clone()
            self._memo[id(value)] = kept.requires_grad_(value.requires_grad)
        elif isinstance(value, SHARED):
            self._memo[id(value)] = value
        elif isinstance(value, types.FunctionType):
            if not _is_copied(value):
                return  # known by its identity, such as torch's own
            closure, defaults = value.__closure__ or (), _defaults_of(value)
            cells = tuple(types.CellType() for _ in closure)
            own = value.__globals__, value.__name__, None, cells
            again = types.FunctionType(value.__code__, *own)
            vars(again).update(vars(value))
            self._memo[id(value)] = again
            self._functions.append((value, again))
            for each in (*map(_content, closure), *defaults):
                self._prepare(each)
        else:
            for each in _held_by(value):
                self._prepare(each)

    def _fill(self, function: Any, again: Any) -> None:
        cells = zip(function.__closure__ or (), again.__closure__ or (), strict=True)
        for own, other in cells:
            if (content := _content(own)) is not EMPTY:
                other.cell_contents = copy.deepcopy(content, self._memo)
        for name in ("__defaults__", "__kwdefaults__"):
            setattr(again, name, copy.deepcopy(getattr(function, name), self._memo))

    def _copy_hooks(self, module: nn.Module) -> None:
        """Copy the hooks of parameters, which deepcopy drops."""
        copies = dict(self.module.named_parameters())
        for name, parameter in module.named_parameters():
            if copies[name] is parameter:
                continue
            for hooks, register in zip(
                _HOOKS,
                (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook),
                strict=True,
            ):
                for hook in (getattr(parameter, hooks, None) or {}).values():
                    if not _is_ours(hook):
                        register(copies[name], self.of(hook, f"a hook of {name}"))


def read_apart(dataset: Any, depth: int = 4) -> Any:
    """A copy of a data set or of a collate function, to read rows with: the original
    would count, and draw random numbers, once more than in training. It shares tensors,
    long lists, and what lies deeper than four objects."""
    if is_generator(dataset):
        return copy.deepcopy(dataset)
    if not depth:
        return dataset
    if type(dataset) in (list, tuple) and len(dataset) <= MOST_PARTS:
        # Such as transforms.
        return type(dataset)(read_apart(each, depth - 1) for each in dataset)
    shares = isinstance(dataset, type | nn.Module | Tensor | types.FunctionType)
    if shares or not hasattr(dataset, "__dict__"):
        return dataset
    again = copy.copy(dataset)
    if again is not dataset:
        for name, value in vars(again).items():
            vars(again)[name] = read_apart(value, depth - 1)
    return again


def move_weights(module: nn.Module, shared: dict[int, str]) -> None:
    """Move all weights a little, alike in each copy.

    Then a momentum copy that still equals its source, a gate or a head that begins at
    zero, show what they will do.

    Args:
        module: a copy.
        shared: what it shares with the original, and what so stays as it is.
    """
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(4093, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            is_shared = parameter.untyped_storage().data_ptr() in shared
            if is_shared or not parameter.is_floating_point() or not parameter.numel():
                continue
            noise = base.roll(17 * number).to(parameter)
            times = -(-parameter.numel() // len(noise))
            flat = noise.expand(times, -1).reshape(-1)[: parameter.numel()]
            spread = parameter.std(correction=0)
            size = torch.where(spread > 1e-6, SPREAD * spread, LEAST_MOVE)
            parameter.add_(flat.view(parameter.shape) * size)


def _refuse(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if is_lazy(parameter):
            raise NotMeasured(f"{name} gets its shape in the first pass")
        if isinstance(parameter, DTensor):
            raise NotMeasured(f"{name} is spread over several ranks")


def _held_by(value: Any) -> list[Any]:
    """What is in a container or an object; modules are looked at one by one."""
    if isinstance(value, type | nn.Module | types.ModuleType | Tensor):
        return []
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, list | tuple | set):
        return [each for each in value]  # list() would ask for a length of its own
    if isinstance(value, types.MethodType):
        return [value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    return list(getattr(value, "__dict__", {}).values())


def _defaults_of(function: types.FunctionType) -> list[Any]:
    named = function.__kwdefaults__ or {}
    return [*(function.__defaults__ or ()), *named.values()]


def _is_copied(value: Any) -> bool:
    """Whether a function holds something of which a copy has another one, or it is
    such a thing."""
    if isinstance(value, types.FunctionType):
        return bool(value.__closure__) or any(map(_is_copied, _defaults_of(value)))
    is_fixed = isinstance(value, type | types.ModuleType | types.BuiltinFunctionType)
    return not is_fixed and hasattr(value, "__dict__")


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return EMPTY


def _is_ours(hook: Callable[..., Any]) -> bool:
    module = getattr(getattr(hook, "__func__", hook), "__module__", None)
    return (module or "").startswith(_OURS)


def _remove_our_hooks(module: nn.Module) -> None:
    """Remove hooks by which trainkit itself counts what layers see."""
    for each in module.modules():
        for name, hooks in vars(each).items():
            if name.endswith("_hooks") and isinstance(hooks, dict):
                for key in [key for key, hook in hooks.items() if _is_ours(hook)]:
                    del hooks[key]


def _culprit(value: Any, memo: dict[int, Any], path: str) -> tuple[str, str]:
    """The path and the type of what cannot be copied within a value."""
    for name, inner in _inside(value):
        try:
            copy.deepcopy(inner, dict(memo))
        except Exception:
            is_module = isinstance(value, nn.Module) and name in (
                "_modules",
                "_parameters",
                "_buffers",
            )
            return _culprit(inner, memo, path if is_module else f"{path}.{name}")
    return path, type(value).__name__


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((str(key), each) for key, each in value.items())
    elif isinstance(value, list | tuple):
        yield from ((str(index), each) for index, each in enumerate(value))
    else:
        yield from getattr(value, "__dict__", {}).items()


def samples_across(loader: Any, number: int, collate: Any) -> list[Any]:
    """Rows from all over a data set, and the next of each; none if it cannot be read,
    or if the collate function draws at random, so that no two batches are alike."""
    if not isinstance(loader, DataLoader) or loader.batch_sampler is None:
        return []
    if isinstance(loader.dataset, IterableDataset):
        return []
    with contextlib.suppress(Exception), random_kept():
        last: int = len(loader.dataset) - 1  # type: ignore[arg-type]
        firsts = {round(n * last / (number // 2)) for n in range(number // 2 + 1)}
        indices = firsts | {min(each + 1, last) for each in firsts}
        rows = list(rows_at(read_apart(loader.dataset), sorted(indices)))
        return rows if _repeats(collate, rows) else []
    return []


def _repeats(collate: Callable[[list[Any]], Any], rows: list[Any]) -> bool:
    """Whether a collate function makes the same batch of the same rows again."""
    pairs = zip(*(take_apart(collate(list(rows)))[0] for _ in range(2)), strict=True)
    return all(
        torch.equal(one.nan_to_num(), other.nan_to_num())
        for (_, one), (_, other) in pairs
        if isinstance(one, Tensor)
    )


def collates_by_itself(loader: Any) -> bool:
    """Whether a loader has a collate function of its own."""
    own = getattr(loader, "collate_fn", default_collate)
    return getattr(own, "__module__", "").partition(".")[0] != "torch"
