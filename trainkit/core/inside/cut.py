"""What stands for a module that runs in chunks of rows: for its forward, for itself,
for a call of it as autograd sees it, and for its parameters while chunks run.

A shadow shares its parameter's storage and has a gradient of its own, in which autograd
adds up what the chunks give. So hooks on parameters, DDP and tied weights see one
gradient, of all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from trainkit.core.gradients import HALF
from trainkit.core.inside.rows import Sizes
from trainkit.core.nested import Build, take_apart
from trainkit.core.plan.options import check_whole_number
from trainkit.errors import TrainkitError


class Cut:
    """A module's forward, in chunks of rows; it stands on the instance.

    It is an object, not a function: a copy of the module then has a copy of it, which
    runs the copy, and both can be pickled.

    Args:
        module: whose forward is replaced.
        name: of the module, for messages.
        sizes: how large a chunk may be.

    Attributes:
        refused: methods of modules, by name, and what stands for them while a chunk
            runs.
        was_cut: whether a call ran in chunks.
        most_rows: that a call had which trains.
        shadows: of the parameters that train, once there was a call.
    """

    def __init__(self, module: nn.Module, name: str, sizes: Sizes) -> None:
        self.module, self.name, self.sizes = module, name, sizes
        self.refused: Sequence[tuple[nn.Module, str, Any]] = ()
        self.was_cut, self.most_rows = False, 0
        self.shadows: Shadows | None = None
        self._before: Any = vars(module).get("forward")

    def __getstate__(self) -> dict[str, Any]:
        """A copy begins anew."""
        return {**vars(self), "refused": (), "shadows": None}

    @property
    def original(self) -> Any:
        """The module's own forward."""
        if self._before is not None:
            return self._before
        return type(self.module).forward.__get__(self.module)

    @property
    def trains(self) -> bool:
        """Whether a call would be one of training."""
        return self.module.training or torch.is_grad_enabled()

    def run(
        self,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        *,
        has_cache: bool = False,
    ) -> tuple[list[str], list[Any], Build]:
        """The paths of the parts of what the module's own forward returns for a chunk,
        the parts, and what builds an output of them.

        Models of transformers return a cache of keys in training too, where nothing
        reads it, and its rows cannot be joined: so that is turned off meanwhile.

        Args:
            args: by place.
            kwargs: by name.
            has_cache: whether it may return a cache.
        """
        config: Any = getattr(self.module, "config", None)
        caches = getattr(config, "use_cache", False) is True and not has_cache
        before = []
        try:
            if caches:
                config.use_cache = False
            for module, name, refusal in self.refused:
                own = vars(module)
                before.append((own, name, own.get(name)))
                own[name] = refusal
            output = self.original(*args, **kwargs)
        finally:
            if caches:
                config.use_cache = True
            for own, name, method in before:
                own.pop(name, None)
                if method is not None:
                    own[name] = method
        if isinstance(output, Tensor):
            return [""], [output], next
        fields, build = take_apart(output)
        return [f.path for f in fields], [f.value for f in fields], build

    def install(self) -> None:
        """Take the place of the module's forward."""
        vars(self.module)["forward"] = self

    def remove(self) -> None:
        """Give the module its own forward back."""
        if vars(self.module).get("forward") is self:
            del vars(self.module)["forward"]
            if self._before is not None:
                vars(self.module)["forward"] = self._before


class Node(torch.autograd.Function):
    """A call that has run in chunks, as autograd sees it: one node.

    It is applied to the call, to its outputs and which of them have a gradient, to what
    must not change before the backward pass, which then raises as usual, and to its
    inputs. The call has a name, and a method `backward`, from what was saved and the
    gradients of outputs to those of inputs.
    """

    @staticmethod
    def forward(
        ctx: Any,
        call: Any,
        outputs: Sequence[Tensor],
        differentiable: Sequence[bool],
        saved: Sequence[Tensor],
        *inputs: Tensor,
    ) -> Any:
        ctx.call = call
        ctx.save_for_backward(*saved)
        pairs = zip(outputs, differentiable, strict=True)
        ctx.mark_non_differentiable(*[each for each, trains in pairs if not trains])
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:  # pyright: ignore
        if torch.is_grad_enabled():
            raise TrainkitError(
                f"{ctx.call.name}: it runs in chunks, so that its gradient has no "
                f"gradient of its own, which create_graph=True asks for. Name another "
                f"module to cut, or leave out the gradient penalty."
            )
        found = ctx.call.backward(ctx.saved_tensors, gradients)
        return (None, None, None, None, *found)


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

    @contextmanager
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


def strangers_of(outputs: Sequence[Any], known: Sequence[Tensor], name: str) -> Any:
    """The tensors that get a gradient from some outputs, and are not known; parameters
    among them are refused.

    Args:
        outputs: tensors and other values.
        known: what may get a gradient.
        name: of the module, for messages.
    """
    tensors = [each for each in outputs if isinstance(each, Tensor)]
    leaves: list[Any] = [each for each in tensors if each.is_leaf]
    waiting, seen = [each.grad_fn for each in tensors], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            leaves.append(getattr(node, "variable", None))
            for following, _ in node.next_functions:
                waiting.append(following)
    familiar = set(map(id, known))
    found = {
        id(leaf): leaf
        for leaf in leaves
        if leaf is not None and leaf.requires_grad and id(leaf) not in familiar
    }
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


SHARED = (
    "_parameters",
    "_buffers",
    "_modules",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
"""What a module and that which stands for it have in common."""

Own = TypeVar("Own", bound="InPlaceOf")


def check_cut(name: str, module: Any, size: Any) -> None:
    """Refuse what is no module, and a size of chunks that is no whole number.

    Args:
        name: of what cuts it.
        module: to be cut.
        size: the most rows in a chunk.
    """
    if not isinstance(module, nn.Module):
        raise TrainkitError(
            f"{name}: must be given a torch module, received {type(module).__name__}."
        )
    check_whole_number(f"{name} size", size)


class InPlaceOf(nn.Module):
    """Can be called in a module's place, and has its parameters and state.

    `remove`, or the end of a `with` block, gives the module its own forward back.

    Args:
        module: for which it stands.
        forward: what stands in place of its forward.
    """

    _stands_for: Any
    _forward: Any

    def __init__(self, module: nn.Module, forward: Any) -> None:
        super().__init__()
        vars(self)["_stands_for"] = module  # not a part of this one
        self._forward = forward
        forward.install()
        for held in SHARED:
            vars(self)[held] = vars(module)[held]
        self.training = module.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._stands_for(*args, **kwargs)

    def remove(self) -> None:
        """Give the module its own forward back."""
        self._forward.remove()

    def __enter__(self) -> nn.Module:
        return self._stands_for

    def __exit__(self, *error: Any) -> None:
        self.remove()

    def _save_to_state_dict(self, *args: Any) -> None:  # pyright: ignore
        self._stands_for._save_to_state_dict(*args)

    def _load_from_state_dict(self, *args: Any) -> None:  # pyright: ignore
        self._stands_for._load_from_state_dict(*args)

    def train(self: Own, mode: bool = True) -> Own:
        self.training = mode
        self._stands_for.train(mode)
        return self
