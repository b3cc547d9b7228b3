"""What stands for the inputs of a call while chunks of rows run.

A shadow shares the storage of a parameter, or of an argument, and has a gradient of its
own, in which autograd adds up what the chunks give. So hooks on parameters, DDP and
tied weights see one gradient, of all rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from trainkit.core.gradients import HALF
from trainkit.errors import TrainkitError


class Shadows:
    """Stand for parameters of a module, and for arguments.

    Args:
        module: which is called.
        inputs: those that train.

    Attributes:
        own: their shadows, in this order.
    """

    def __init__(self, module: nn.Module, inputs: Sequence[Tensor]) -> None:
        self._wide: dict[int, Tensor] = {}
        self.own = [self._shadow_of(each) for each in inputs]
        by_id = dict(zip(map(id, inputs), self.own, strict=True))
        modules = list(module.modules())
        self._places: list[tuple[Any, str, Any, Tensor]] = [
            (each._parameters, name, parameter, by_id[id(parameter)])
            for each in modules
            for name, parameter in each._parameters.items()
            if id(parameter) in by_id
        ]
        self._recurrent = [each for each in modules if isinstance(each, nn.RNNBase)]

    def _shadow_of(self, whole: Tensor) -> Tensor:
        shadow = whole.detach().requires_grad_()
        if isinstance(whole, nn.Parameter):
            shadow = nn.Parameter(shadow)
            vars(shadow).update(vars(whole))
        if whole.dtype in HALF:
            shadow.register_post_accumulate_grad_hook(self._widen)
        return shadow

    def _widen(self, shadow: Tensor) -> None:
        """Add up half precision in float32: in bfloat16 a chunk's share may be too
        small to move the sum."""
        assert shadow.grad is not None
        total, gradient = self._wide.get(id(shadow)), shadow.grad
        shadow.grad = None
        self._wide[id(shadow)] = (
            gradient.float() if total is None else total.add_(gradient)
        )

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Within it, the module has them in place of its parameters."""
        try:
            for place, name, _, shadow in self._places:
                place[name] = shadow
            for each in self._recurrent:
                renew_list(each)
            yield
        finally:
            for place, name, parameter, _ in self._places:
                place[name] = parameter
            for each in self._recurrent:
                renew_list(each)

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


def renew_list(layer: Any) -> None:
    """Recurrent layers hold their weights in a list as well."""
    layer._flat_weights = [layer._parameters[n] for n in layer._flat_weights_names]


def strangers_of(outputs: Sequence[Any], known: Sequence[Tensor], name: str) -> Any:
    """The tensors that get a gradient from some outputs, and are not known; parameters
    among them are refused.

    Args:
        outputs: tensors and other values.
        known: what may get a gradient.
        name: of the module, for messages.
    """
    trains = [x for x in outputs if isinstance(x, Tensor) and x.requires_grad]
    found = {id(each): each for each in trains if each.grad_fn is None}
    waiting, seen = [each.grad_fn for each in trains], set[Any]()
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found[id(leaf)] = leaf
    for each in known:
        found.pop(id(each), None)
    if foreign := [each for each in found.values() if isinstance(each, nn.Parameter)]:
        shapes = ", ".join(str(list(each.shape)) for each in foreign)
        raise TrainkitError(
            f"{name}: what trains must be a parameter of it or an argument, and its "
            f"output depends on a tensor of shape {shapes} that is neither, and would "
            f"get no gradient. Pass it as an argument, or make it a parameter of this "
            f"module."
        )
    return list(found.values())
