"""What the forward of a module must not do, where micro-batches run in turns."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from trainkit.core.batch_norm.layers import listed
from trainkit.core.inside.moment import Moment
from trainkit.core.joins.layers import other_norms, running_statistics
from trainkit.core.joins.left import Left
from trainkit.core.joins.net import Net
from trainkit.core.joins.places import computed
from trainkit.errors import TrainkitError


class Watch:
    """Refuses what the forward of a module must not do.

    Args:
        net: whose forward runs.
        moment: what the module is like before.
        is_first: whether it is the first call, in which more is looked at.
    """

    def __init__(self, net: Net, moment: Moment, *, is_first: bool) -> None:
        self._net, self._moment = net, moment
        others = other_norms(net.module, net.name)
        # Layers move these; InstanceNorm's move with each micro-batch.
        moment.leave_out(running_statistics(net.module, {**net.layers, **others}))
        if others and is_first:
            warnings.warn(
                f"exact BatchNorm: {listed(list(others.values()))} moves running "
                f"statistics with each micro-batch, which one batch does once. The "
                f"gradient is right; what is kept for evaluation is not the big "
                f"batch's. Use track_running_stats=False.",
                stacklevel=2,
            )
        self._places = self._places_now()
        self._left = Left(net.module) if is_first else None
        self._functions = _Functions(net.name) if is_first else None

    def __enter__(self) -> None:
        if self._functions is not None:
            self._functions.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._functions is not None:
            self._functions.__exit__(*error)

    def check(self) -> None:
        """Refuse what a forward that has run has changed."""
        name = self._net.name
        self._moment.check_state()
        now, before = self._places_now(), self._places
        if moved := [each for each in before if now.get(each) != before[each]]:
            raise TrainkitError(
                f"{name}: its forward pass must not exchange the data of weights, "
                f"which micro-batches that run in turns would put back for each other, "
                f"and it exchanged {listed(moved)}. Compute other weights, and pass "
                f"them on."
            )
        left = [] if self._left is None else self._left.since(with_graph=True)
        no_harm = {
            f"{path}.{each}".lstrip(".")
            for path, module in self._net.module.named_modules()
            for each in computed(module)
        }
        left = [name for name in left if name not in no_harm]
        if left:
            raise TrainkitError(
                f"{name}: its forward leaves tensors with a gradient in "
                f"{listed(left)}, where each micro-batch overwrites those of the one "
                f"before. Return them as outputs, or detach() them."
            )

    def _places_now(self) -> dict[str, int]:
        """Where in memory the weights are."""
        own = (Tensor, nn.Parameter)
        named = self._net.module.named_parameters()
        return {name: each.data_ptr() for name, each in named if type(each) in own}


class _Functions(TorchFunctionMode):
    """Refuses a BatchNorm that is called as a function.

    Args:
        name: of the module that runs.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (F.batch_norm, torch.batch_norm, torch.native_batch_norm):
            training = kwargs.get("training", args[5] if len(args) > 5 else False)
            if training:
                raise TrainkitError(
                    f"{self._name}: it calls functional.batch_norm(training=True), "
                    f"which normalises each micro-batch by itself. Call a layer, such "
                    f"as torch.nn.BatchNorm2d, or choose another policy."
                )
        return func(*args, **kwargs)


def refuse_sharded(module: nn.Module, name: str) -> None:
    """Refuse what FSDP shards, and what has no shape yet."""
    for path, each in module.named_modules():
        if isinstance(each, FSDPModule):
            raise TrainkitError(
                f"exact BatchNorm: {path or name} is sharded by FSDP2, which expects "
                f"one forward pass at a time. Use DDP, or another policy."
            )
    for path, parameter in module.named_parameters():
        if isinstance(parameter, DTensor) or is_lazy(parameter):
            what = "has no shape yet" if is_lazy(parameter) else "is sharded"
            raise TrainkitError(
                f"exact BatchNorm: {path} {what}. Run one batch before training, or "
                f"use DDP."
            )
