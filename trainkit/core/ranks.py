"""The ranks that share a window, and what their backend does to gradients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from trainkit.core._compat import (
    gradient_divide_factors,
    ignored_names,
    is_apart,
)
from trainkit.core.plan.options import check_choice
from trainkit.errors import TrainkitError

Aggregation = Literal["auto", "mean", "sum", "none"]


@dataclass(frozen=True)
class Ranks:
    """The data-parallel ranks of a window. Tensor-parallel ranks count as one.

    Attributes:
        aggregation: what the backend does to gradients across these ranks: it leaves
            their `"mean"` (DDP, FSDP) or their `"sum"`, or does nothing (`"none"`).
        group: their process group; None is the default group.
        size: the number of ranks.
        index: this process's place among them.
        ddp: the DDP wrapper, if there is one.
        multiplier: the factor that turns the backend's gradient into a sum over ranks.
        backend_sums: whether backward passes already communicate between these ranks.
    """

    aggregation: Literal["mean", "sum", "none"] = "none"
    group: Any = None
    size: int = 1
    index: int = 0
    ddp: DistributedDataParallel | None = None
    multiplier: int = field(init=False)
    backend_sums: bool = field(init=False)

    def __post_init__(self) -> None:
        is_mean = self.aggregation == "mean"
        backend_sums = self.size > 1 and self.aggregation != "none"
        object.__setattr__(self, "multiplier", self.size if is_mean else 1)
        object.__setattr__(self, "backend_sums", backend_sums)

    @property
    def holds_back_gradients(self) -> bool:
        """Whether the present backward pass leaves gradients on DDP's ranks."""
        return self.backend_sums and self.ddp is not None and is_apart(self.ddp)

    def gather_rows(self, row: Tensor) -> Tensor:
        """A table of all ranks' rows; on a GPU the stream waits, the host does not."""
        table, work = self.send_row(row)
        if work is not None:
            work.wait()
        return table

    def send_row(self, row: Tensor) -> tuple[Tensor, Any]:
        """Start to send this rank's row to every rank; returns the table of all, and
        the work to wait for, or None.

        It is one all-reduce of a table in which each rank fills its own row. So sums
        are exact and in one order on all ranks, and a flag shows which rank it is from.
        """
        if self.size == 1:
            return row.unsqueeze(0), None
        table = row.new_zeros(self.size, row.numel())
        table[self.index] = row
        return table, dist.all_reduce(table, group=self.group, async_op=True)

    def sum_(self, tensor: Tensor) -> Tensor:
        """Add up a tensor over these ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor


BUCKET = 2**24
"""How many elements are added up in one message, which needs a copy of them."""


@torch.no_grad()
def sum_over_ranks_(
    parameters: Iterable[Tensor], ranks: Ranks, *, times: float = 1.0
) -> None:
    """Add up gradients over ranks, where no backend does.

    A parameter that has a gradient on some ranks gets the sum on all of them. Without
    a gradient on any rank it keeps None, so that its optimizer state does not move.

    Args:
        parameters: whose gradients.
        ranks: the ranks to add up over.
        times: what to multiply the sums by.
    """
    alike: dict[Any, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.requires_grad:
            alike[parameter.device, parameter.dtype].append(parameter)
    for members in alike.values():
        for bucket in _buckets(members):
            _sum_bucket_(bucket, ranks, times)


def _sum_bucket_(members: list[Tensor], ranks: Ranks, times: float) -> None:
    present = [p.grad is not None for p in members]
    flat = [
        torch.zeros_like(p).flatten() if p.grad is None else _dense(p.grad)
        for p in members
    ]
    marks = flat[0].new_tensor(present)
    total = ranks.sum_(torch.cat([*flat, marks]))
    values, counts = total[: -len(members)], total[-len(members) :]
    # Only a rank that lacks a gradient has to know whether another has it.
    used = [True] * len(members) if all(present) else (counts > 0).tolist()
    if times != 1:
        values.mul_(times)
    sums = values.split([p.numel() for p in members])
    for parameter, total_of_it, is_used in zip(members, sums, used, strict=True):
        if is_used:
            _assign(parameter, total_of_it.view_as(parameter))


def _buckets(members: list[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    size = 0
    for parameter in members:
        bucket.append(parameter)
        size += parameter.numel()
        if size >= BUCKET:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket


def _dense(gradient: Tensor) -> Tensor:
    return (gradient.to_dense() if gradient.is_sparse else gradient).flatten()


def _assign(parameter: Tensor, whole: Tensor) -> None:
    if parameter.grad is None or parameter.grad.is_sparse:
        parameter.grad = whole.clone()
    else:
        parameter.grad.copy_(whole)


def check_aggregation(aggregation: Any) -> None:
    """Refuse what names nothing that a backend does to gradients."""
    check_choice("aggregation", aggregation, get_args(Aggregation))


def find_ranks(
    module: Any = None, aggregation: Aggregation = "auto", group: Any = None
) -> Ranks:
    """Find the ranks that share a window, and what their backend does to gradients.

    Args:
        module: a module that trains, wrapped or not, or Lightning's strategy object.
        aggregation: what the backend does, or `"auto"` to read it from `module`.
        group: the data-parallel process group, if it is not the module's own.

    Raises:
        TrainkitError: there are several ranks, and `module` does not show what is done.
    """
    check_aggregation(aggregation)
    if not dist.is_initialized() or _is_alone(module):
        return Ranks()
    ddp = _submodule(module, DistributedDataParallel)
    if aggregation == "none" and ddp is not None and ddp.process_group.size() > 1:
        raise TrainkitError(
            "aggregation='none': the module is DistributedDataParallel, which averages "
            "gradients, and trainkit would add them up once more. Use 'auto'. If a "
            "communication hook of yours leaves gradients apart, pass no module."
        )
    if aggregation != "auto":
        group = group or _group_of(module, ddp)
        return _ranks(aggregation, group, ddp)
    if ddp is not None:
        return _ranks("mean", group or ddp.process_group, ddp)
    if _spans_ranks(module):
        group = group or _group_of(module, ddp)
        return _ranks(_what_fsdp_leaves(module, group), group, ddp)
    if dist.get_world_size(group) == 1:
        return Ranks()
    raise TrainkitError(
        f"aggregation: {dist.get_world_size(group)} ranks are running, and "
        f"{'no module was given' if module is None else type(module).__name__} does "
        f"not show what the backend does to gradients across them. Pass module= (a "
        f"DDP or FSDP module), or aggregation='mean' (the backend averages), 'sum' "
        f"(it adds up) or 'none' (it does nothing, trainkit adds up)."
    )


def _is_alone(module: Any) -> bool:
    """Whether it is Lightning's strategy object for one device, beside other ranks."""
    return any(cls.__name__ == "SingleDeviceStrategy" for cls in type(module).__mro__)


def _ranks(aggregation: Any, group: Any, ddp: DistributedDataParallel | None) -> Ranks:
    size = dist.get_world_size(group)
    return Ranks(aggregation, group, size, dist.get_rank(group), ddp)


def _spans_ranks(module: Any) -> bool:
    return (
        _data_parallel_mesh(module) is not None
        or _submodule(module, FullyShardedDataParallel) is not None
        or _sharded_mesh(module) is not None
    )


def _group_of(module: Any, ddp: DistributedDataParallel | None) -> Any:
    """The data-parallel group that a module shows; None is the default group."""
    if ddp is not None:
        return ddp.process_group
    mesh = _data_parallel_mesh(module) or _sharded_mesh(module)
    if mesh is None:
        return None
    if mesh.ndim == 1:
        return mesh.get_group()
    raise TrainkitError(
        f"aggregation='auto': the parameters are sharded over a mesh of "
        f"{mesh.ndim} dimensions {mesh.mesh_dim_names}, and which of them hold "
        f"data-parallel replicas cannot be read from it. Pass aggregation='mean' and "
        f"process_group=, the group of all ranks that have their own data: for "
        f"example mesh['dp'].get_group(), or torch.distributed.group.WORLD if that is "
        f"every rank."
    )


def _data_parallel_mesh(strategy: Any) -> Any:
    """The mesh of data-parallel ranks in Lightning's `ModelParallelStrategy`."""
    if isinstance(strategy, nn.Module) or not hasattr(
        strategy, "distributed_sampler_kwargs"
    ):
        return None
    mesh = getattr(strategy, "device_mesh", None)
    if mesh is None or "data_parallel" not in (mesh.mesh_dim_names or ()):
        return None
    return mesh["data_parallel"]


def _sharded_mesh(module: Any) -> Any:
    for parameter in _parameters(module).values():
        if isinstance(parameter, DTensor):
            return parameter.device_mesh
    return None


def averaged_by_ddp(module: Any, aggregation: Aggregation) -> frozenset[int] | None:
    """The ids of the parameters whose gradients DDP averages: it ignores some, and
    knows nothing of those that were frozen when it was made. None where nothing shows
    whose gradients are averaged: with FSDP1, and where `aggregation` says it."""
    root = _root(module)
    modules = [] if root is None else [*root.modules()]
    wrappers = [m for m in modules if isinstance(m, DistributedDataParallel)]
    is_fsdp1 = any(isinstance(m, FullyShardedDataParallel) for m in modules)
    if not wrappers and (is_fsdp1 or aggregation != "auto"):
        return None
    return frozenset(
        id(parameter)
        for ddp in wrappers
        for name, parameter in ddp.module.named_parameters()
        if parameter.requires_grad and name not in ignored_names(ddp)
    )


def averaged_by_fsdp(parameter: Tensor, module: Any) -> bool:
    """Whether FSDP2 shards a parameter, so that it averages its gradient."""
    if not isinstance(parameter, DTensor):
        return False
    is_split_only = parameter.device_mesh.mesh_dim_names == ("tensor_parallel",)
    return _data_parallel_mesh(module) is None or not is_split_only


def _what_fsdp_leaves(module: Any, group: Any) -> str:
    """What FSDP leaves of gradients: their mean, unless another factor was set."""
    root = _root(module)
    factors = set() if root is None else gradient_divide_factors(root)
    size = dist.get_world_size(group)
    if factors <= {None, float(size)}:
        return "mean"
    if factors == {1.0}:
        return "sum"
    raise TrainkitError(
        f"aggregation='auto': set_gradient_divide_factor() makes FSDP divide by "
        f"{sorted(map(str, factors))} over {size} ranks, which leaves neither their "
        f"mean nor their sum everywhere. Set it to 1.0 on all modules, or nowhere."
    )


def _submodule(module: Any, kind: type) -> Any:
    root = _root(module)
    if root is None:
        return None
    return next((m for m in root.modules() if isinstance(m, kind)), None)


def _parameters(module: Any) -> dict[str, Any]:
    root = _root(module)
    return {} if root is None else dict(root.named_parameters())


def _root(module: Any) -> nn.Module | None:
    """The module itself, or the module of Lightning's strategy object."""
    root = module if isinstance(module, nn.Module) else getattr(module, "model", None)
    return root if isinstance(root, nn.Module) else None
