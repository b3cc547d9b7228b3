"""What stands for a module's parameters while its chunks run.

A shadow shares its parameter's storage and has a gradient of its own, in which autograd
adds up what the chunks give. So hooks on parameters, DDP and tied weights see one
gradient, of all rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import (
    FlatParameter,
    FSDPModule,
    FullyShardedDataParallel,
)

from trainkit.core.gradients import HALF
from trainkit.core.inside.outputs import Unfit
from trainkit.errors import TrainkitError


class Shadows:
    """Stand for some parameters of a module.

    Args:
        module: which is called.
        parameters: those that train.
    """

    def __init__(self, module: nn.Module, parameters: Sequence[Tensor]) -> None:
        self._module = module
        self.parameters = list(parameters)
        self._wide: dict[int, Tensor] = {}
        self.own = [_shadow_of(each, self._widen) for each in self.parameters]
        by_id = {
            id(one): other for one, other in zip(self.parameters, self.own, strict=True)
        }
        self._places = [
            (each._parameters, name, parameter, by_id[id(parameter)])
            for each in module.modules()
            for name, parameter in each._parameters.items()
            if id(parameter) in by_id
        ]
        self._recurrent = [m for m in module.modules() if isinstance(m, nn.RNNBase)]

    def fit(self, parameters: Sequence[Tensor]) -> bool:
        """Whether they can stand for these parameters, as they are now."""
        return (
            [id(each) for each in parameters] == [id(each) for each in self.parameters]
            and [x.data_ptr() for x in parameters] == [x.data_ptr() for x in self.own]
            and all([place.get(name) is x for place, name, x, _ in self._places])
        )

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Within it, the module has them in place of its parameters."""
        try:
            for place, name, _, shadow in self._places:
                place[name] = shadow
            self._renew_lists()
            yield
        finally:
            for place, name, parameter, _ in self._places:
                place[name] = parameter
            self._renew_lists()

    def clear(self) -> None:
        """Forget all gradients."""
        self._wide.clear()
        for each in self.own:
            each.grad = None

    def gradients(self) -> list[Tensor | None]:
        """The gradients that have been added up; None where nothing came."""
        return [
            self._wide[id(each)].to(each.dtype) if id(each) in self._wide else each.grad
            for each in self.own
        ]

    def _widen(self, shadow: Tensor) -> None:
        """Add up half precision in float32: in bfloat16 a chunk's share may be too
        small to move the sum."""
        assert shadow.grad is not None
        total, gradient = self._wide.get(id(shadow)), shadow.grad
        shadow.grad = None
        self._wide[id(shadow)] = (
            gradient.float() if total is None else total.add_(gradient)
        )

    def _renew_lists(self) -> None:
        """Recurrent layers hold their weights in a list as well."""
        for each in self._recurrent:
            each._flat_weights = [
                each._parameters[name] for name in each._flat_weights_names
            ]


def _shadow_of(parameter: Tensor, widen: Callable[[Tensor], None]) -> nn.Parameter:
    shadow = nn.Parameter(parameter.detach())
    vars(shadow).update(vars(parameter))
    if parameter.dtype in HALF:
        shadow.register_post_accumulate_grad_hook(widen)
    return shadow


def refuse_shards(module: nn.Module, name: str) -> None:
    """Refuse a module whose parameters are sharded in a way that chunks do not see.

    Args:
        module: which is cut.
        name: of it, for messages.
    """
    within = [each for each in module.modules() if each is not module]
    if any(isinstance(each, FSDPModule) for each in within):
        raise TrainkitError(
            f"{name}: parts of it are sharded by fully_shard (FSDP2) each for itself, "
            f"and they free and reduce their weights in each chunk. Shard the module "
            f"that is cut as one group, or one around it; or use DDP."
        )
    flat: Any = (FullyShardedDataParallel, FlatParameter)
    if any(isinstance(each, flat) for each in [*within, module, *module.parameters()]):
        raise TrainkitError(
            f"{name}: FullyShardedDataParallel flattens weights and frees them after "
            f"each forward pass, so that chunks get no gradient. Shard by "
            f"torch.distributed.fsdp.fully_shard (FSDP2; ModelParallelStrategy in "
            f"Lightning), or use DDP."
        )


def leaves_of(outputs: Sequence[Any], *, refused: str = "") -> list[Tensor]:
    """The tensors that get a gradient from some outputs, read from their graph.

    Args:
        outputs: tensors and other values.
        refused: the name of the step of a reentrant checkpoint, if that is refused.
    """
    found, seen = [], set()
    waiting: list[Any] = []
    for output in outputs:
        if isinstance(output, Tensor) and output.requires_grad:
            if output.grad_fn is None:
                found.append(output)
            waiting.append(output.grad_fn)
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == refused:
            raise Unfit(
                "it has activation checkpoints with use_reentrant=True, which warn of "
                "each chunk that runs without a graph. Write use_reentrant=False"
            )
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found.append(leaf)
        for following, _ in node.next_functions:
            waiting.append(following)
    return list({id(each): each for each in found}.values())


def refuse_strangers(found: Sequence[Tensor], name: str) -> None:
    """Raise an error, if there are any tensors that train and are not known."""
    if found:
        shapes = ", ".join(str(list(each.shape)) for each in found)
        raise TrainkitError(
            f"{name}: what trains must be a parameter of it or an argument, and its "
            f"output depends on a tensor of shape {shapes} that is neither, and would "
            f"get no gradient. Pass it as an argument, or make it a parameter of this "
            f"module."
        )
