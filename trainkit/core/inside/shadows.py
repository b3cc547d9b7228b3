"""What stands for the parameters of a module while chunks of rows run.

A shadow shares its parameter's storage and has a gradient of its own, in which autograd
adds up what the chunks give. So hooks on parameters, DDP and tied weights see one
gradient, of all rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from trainkit.core.gradients import HALF
from trainkit.errors import TrainkitError


class Shadows:
    """Stand for some parameters of a module.

    Args:
        module: which is called.
        parameters: those that train.

    Attributes:
        own: the shadows of the parameters, in this order.
    """

    def __init__(self, module: nn.Module, parameters: Sequence[Tensor]) -> None:
        self._parameters = list(parameters)
        self._wide: dict[int, Tensor] = {}
        self.own = [_shadow_of(each, self._widen) for each in parameters]
        pairs = zip(parameters, self.own, strict=True)
        by_id = {id(parameter): shadow for parameter, shadow in pairs}
        self._places = [
            (each._parameters, name, parameter, by_id[id(parameter)])
            for each in module.modules()
            for name, parameter in each._parameters.items()
            if id(parameter) in by_id
        ]
        self._recurrent = [m for m in module.modules() if isinstance(m, nn.RNNBase)]

    def fit(self, parameters: Sequence[Tensor]) -> bool:
        """Whether they can stand for these parameters, as they are now."""
        if len(parameters) != len(self._parameters):
            return False
        known = zip(parameters, self._parameters, self.own, strict=True)
        return all(
            [x is y and x.data_ptr() == own.data_ptr() for x, y, own in known]
            + [place.get(name) is x for place, name, x, _ in self._places]
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

    def _widen(self, shadow: Tensor) -> None:
        """Add up half precision in float32: in bfloat16 a chunk's share may be too
        small to move the sum."""
        assert shadow.grad is not None
        total, gradient = self._wide.get(id(shadow)), shadow.grad
        shadow.grad = None
        self._wide[id(shadow)] = (
            gradient.float() if total is None else total.add_(gradient)
        )


def renew_list(layer: Any) -> None:
    """Recurrent layers hold their weights in a list as well."""
    layer._flat_weights = [layer._parameters[n] for n in layer._flat_weights_names]


def _shadow_of(parameter: Tensor, widen: Callable[[Tensor], None]) -> nn.Parameter:
    shadow = nn.Parameter(parameter.detach())
    vars(shadow).update(vars(parameter))
    if parameter.dtype in HALF:
        shadow.register_post_accumulate_grad_hook(widen)
    return shadow


def nodes_of(outputs: Sequence[Any]) -> list[Any]:
    """The nodes of the graph of some outputs."""
    waiting = [each.grad_fn for each in outputs if isinstance(each, Tensor)]
    seen: dict[Any, None] = {}
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen[node] = None
            for following, _ in node.next_functions:
                waiting.append(following)
    return list(seen)


def strangers_of(outputs: Sequence[Any], known: Sequence[Tensor], name: str) -> Any:
    """The tensors that get a gradient from some outputs, and are not known; parameters
    among them are refused.

    Args:
        outputs: tensors and other values.
        known: what may get a gradient.
        name: of the module, for messages.
    """
    found = {id(x): x for x in outputs if isinstance(x, Tensor) and x.requires_grad}
    found = {at: each for at, each in found.items() if each.grad_fn is None}
    for node in nodes_of(outputs):
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found[id(leaf)] = leaf
    for each in known:
        found.pop(id(each), None)
    foreign = [each for each in found.values() if isinstance(each, nn.Parameter)]
    if foreign:
        shapes = ", ".join(str(list(each.shape)) for each in foreign)
        raise TrainkitError(
            f"{name}: what trains must be a parameter of it or an argument, and its "
            f"output depends on a tensor of shape {shapes} that is neither, and would "
            f"get no gradient. Pass it as an argument, or make it a parameter of this "
            f"module."
        )
    return list(found.values())
