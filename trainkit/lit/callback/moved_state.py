"""State that `training_step` itself changes, such as a momentum encoder or a centre.

`training_step` runs once for each micro-batch, so such state changes several times in
an optimizer step.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase
from torchmetrics import Metric, MetricCollection

from trainkit.core.gradients import parameters_of
from trainkit.core.window import totals_dtype

NOT_DUE = nullcontext()

Print = tuple[Tensor, torch.Size, torch.dtype]
"""Two numbers that change with a tensor's values; its shape and dtype."""


class MovedState:
    """Detects that `training_step` changes state which no optimizer moves.

    Such state is: parameters that are frozen or in no optimizer, buffers, and tensors
    and floats that are attributes of the module or its parts. Values are compared, not
    versions, because `p.data.mul_()` does not raise the version. Left out are:

    - running statistics of normalisation layers, and metric objects;
    - what changes its shape, such as a cache that follows the input's length;
    - what holds a graph, such as kept activations;
    - whole numbers, which are mostly counters, and lists, which mostly collect;
    - what is left for `Weighed(by=...)` to count.

    It looks in windows 0, 1, 2, 4, 8, ... of several micro-batches until it has found
    something, because a change may begin late. In these windows it waits for the
    device; in others it does nothing. It copies no tensor. It looks on the first rank
    only, since DDP sends that rank's buffers to the others in each forward pass.

    Args:
        pl_module: what trains.
        left_out: the names of attributes that may change.
    """

    def __init__(self, pl_module: Any, *, left_out: Collection[str] = ()) -> None:
        self._module = pl_module
        self._left_out = left_out
        self._num_windows = 0
        self._has_said = pl_module.global_rank != 0

    def watch(self) -> AbstractContextManager[Any]:
        """A context around one `training_step`, without its backward pass.

        Call it once in each window of several micro-batches, for the first of them.
        """
        number, self._num_windows = self._num_windows, self._num_windows + 1
        if self._has_said or number & (number - 1):
            return NOT_DUE
        return self._looking()

    @contextmanager
    def _looking(self) -> Iterator[None]:
        before, floats = self._prints(), self._floats()
        yield
        names = _changed(before, self._prints())
        names += [
            name
            for name, value in self._floats().items()
            if floats.get(name, value) != value
        ]
        names = [n for n in names if n.rpartition(".")[2] not in self._left_out]
        if names:
            self._has_said = True
            _announce(names)

    @torch.no_grad()
    def _prints(self) -> dict[str, Print]:
        prints = {}
        for name, tensor in self._watched():
            tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if type(tensor) in (Tensor, nn.Parameter) and _is_plain(tensor):
                prints[name] = (_print(tensor.detach()), tensor.shape, tensor.dtype)
        return prints

    def _watched(self) -> Iterator[tuple[str, Tensor]]:
        optimizers = self._module.trainer.optimizers
        trained = {id(p) for opt in optimizers for p in parameters_of(opt)}
        for name, parameter in self._module.named_parameters():
            if not parameter.requires_grad or id(parameter) not in trained:
                yield name, parameter
        for path, module in _parts(self._module):
            held = {**vars(module), **dict(module.named_buffers(recurse=False))}
            for name, value in held.items():
                if isinstance(value, Tensor) and not value.requires_grad:
                    yield f"{path}.{name}".lstrip("."), value

    def _floats(self) -> dict[str, float]:
        return {
            f"{path}.{name}".lstrip("."): value
            for path, module in _parts(self._module)
            for name, value in vars(module).items()
            if type(value) is float and not math.isnan(value)
        }


def _parts(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The parts of a module whose state is checked here, with their paths."""
    left_out: set[int] = set()
    for path, module in root.named_modules():
        if isinstance(module, Metric | MetricCollection):
            left_out.update(map(id, module.modules()))
        if id(module) not in left_out and not isinstance(module, _NormBase):
            yield path, module


def _is_plain(tensor: Tensor) -> bool:
    """Whether torch can sum the tensor."""
    is_strided = tensor.layout is torch.strided and not tensor.is_nested
    is_number = tensor.dtype.is_signed or tensor.dtype.itemsize == 1  # no uint16
    return is_strided and is_number and not (tensor.is_meta or tensor.is_quantized)


def _print(tensor: Tensor) -> Tensor:
    """A fingerprint of a tensor; an unchanged tensor gives equal bits again.

    It is the sum and the norm. If the tensor is not floating point, the count of
    entries that are not 0 takes the norm's place.
    """
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.dtype.itemsize == 1:
        tensor = tensor.view(torch.uint8)  # no sums of float8
    numbers = [tensor.sum(), tensor.count_nonzero()]
    if tensor.is_floating_point():
        dtype = torch.promote_types(tensor.dtype, torch.float32)
        numbers = [
            tensor.sum(dtype=dtype),
            torch.linalg.vector_norm(tensor, dtype=dtype),
        ]
    return torch.stack([n.to(totals_dtype(tensor.device)) for n in numbers])


def _changed(before: Mapping[str, Print], after: Mapping[str, Print]) -> list[str]:
    """The names of what has changed its values; reads once from each device."""
    by_device: dict[torch.device, list[str]] = {}
    for name, (numbers, *kind) in after.items():
        if name in before and list(before[name][1:]) == kind:
            if before[name][0].device == numbers.device:
                by_device.setdefault(numbers.device, []).append(name)
    changed = []
    for names in by_device.values():
        old, new = (
            torch.stack([p[name][0] for name in names]) for p in (before, after)
        )
        same = (old == new) | (old.isnan() & new.isnan())
        flags = same.all(1).tolist()
        changed += [
            name for name, is_same in zip(names, flags, strict=True) if not is_same
        ]
    return changed


def _announce(names: list[str]) -> None:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    warnings.warn(
        f"training_step has changed {', '.join(names[:3])}{more}, which no optimizer "
        f"moves. It runs once for each micro-batch, so they change several times in a "
        f"step, and only once with the whole batch. If the loss depends on them, it "
        f"differs from the whole batch's loss. Change them in on_before_optimizer_step "
        f"of the module, which runs once a step in streamed and in split windows; "
        f"collect what they need of each micro-batch in a list until then.",
        stacklevel=2,
    )
