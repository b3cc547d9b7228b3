"""Copies for a rehearsal, of a module and of what rows are read with: what is thrown
away needs no putting back."""

from __future__ import annotations

import contextlib
import copy
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
from trainkit.data.rows import rows_at
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

_OURS = "trainkit.lit."
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class Copies:
    """Copies a module and what belongs to it, as `copy.deepcopy` does, but for a few.

    The Trainer is left out. Data sets, loaders, large frozen parameters and what was
    imported are shared.
    Tensors that hang on a graph are copied without it. Functions that close over
    something, as hooks often do over their module, close over its copy; their defaults
    stay as they are.

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
        self._cells: list[tuple[types.CellType, types.CellType]] = []
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
            while self._cells:
                own, other = self._cells.pop()
                with contextlib.suppress(ValueError):  # it is empty
                    other.cell_contents = copy.deepcopy(own.cell_contents, self._memo)
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
            if not value.__closure__:
                return  # known by its identity, such as torch's own
            cells = tuple(types.CellType() for _ in value.__closure__)
            own = value.__globals__, value.__name__, value.__defaults__, cells
            again = types.FunctionType(value.__code__, *own)
            again.__kwdefaults__ = value.__kwdefaults__
            vars(again).update(vars(value))
            self._memo[id(value)] = again
            self._cells += zip(value.__closure__, cells, strict=True)
            for each in value.__closure__:
                with contextlib.suppress(ValueError):  # it is empty
                    self._prepare(each.cell_contents)
        else:
            for each in _held_by(value):
                self._prepare(each)

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


def read_apart(dataset: Any, depth: int = 4, seen: dict[int, Any] | None = None) -> Any:
    """A copy of a data set, a loader or a collate function, to read rows with: the
    original would count, and draw random numbers, once more than in training. It shares
    tensors, long lists, what cannot be copied, and what lies deeper than four
    objects."""
    seen = {} if seen is None else seen
    if id(dataset) in seen:
        return seen[id(dataset)]
    if is_generator(dataset):
        return seen.setdefault(id(dataset), copy.deepcopy(dataset))
    if not depth:
        return dataset
    if type(dataset) in (list, tuple) and len(dataset) <= MOST_PARTS:
        # Such as transforms.
        return type(dataset)(read_apart(each, depth - 1, seen) for each in dataset)
    if isinstance(dataset, types.MethodType):
        owner = read_apart(dataset.__self__, depth, seen)
        return types.MethodType(dataset.__func__, owner)
    shares = isinstance(dataset, type | nn.Module | Tensor | types.FunctionType)
    if shares or not hasattr(dataset, "__dict__"):
        return dataset
    with contextlib.suppress(Exception):  # as of an open file
        seen[id(dataset)] = again = copy.copy(dataset)
        for name, held in vars(again).items() if again is not dataset else ():
            is_loaders = isinstance(dataset, DataLoader) and name == "_iterator"
            # It has the workers of the original.
            apart = None if is_loaders else read_apart(held, depth - 1, seen)
            vars(again)[name] = apart
    return seen.get(id(dataset), dataset)


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


@contextlib.contextmanager
def refuse_gradients(module: nn.Module) -> Iterator[None]:
    """Refuse a copy that goes backward into the module itself, as by the default of a
    function, which is not copied."""
    held = [(each, each.grad) for each in module.parameters()]
    for each, _ in held:
        each.grad = None
    try:
        yield
        if any(each.grad is not None for each, _ in held):
            raise NotMeasured("something in the copy refers to the module itself")
    finally:
        for each, gradient in held:
            each.grad = gradient


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
    return list(getattr(value, "__dict__", {}).values())


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


def _culprit(value: Any, memo: dict[int, Any], name: str) -> tuple[str, str]:
    """The path and the type of what cannot be copied: an attribute of a value, or of a
    submodule of it."""
    modules = value.named_modules() if isinstance(value, nn.Module) else [("", value)]
    for path, each in modules:
        for key, held in getattr(each, "__dict__", {}).items():
            try:
                copy.deepcopy(None if key == "_modules" else held, dict(memo))
            except Exception:
                return ".".join(filter(None, (name, path, key))), type(held).__name__
    return name, type(value).__name__


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
