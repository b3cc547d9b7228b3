"""Private parts of torch that the core needs. Each function has a test."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode


def gradient_divide_factors(module: nn.Module) -> set[float | None]:
    """What FSDP2 divides summed gradients by; None means by the number of ranks.

    `set_gradient_divide_factor` sets it, and no public function returns it.
    """
    states: list[Any] = [
        m._get_fsdp_state() for m in module.modules() if isinstance(m, FSDPModule)
    ]
    groups = [group for state in states for group in _groups(state)]
    return {getattr(group, "gradient_divide_factor", None) for group in groups}


def keeps_graph() -> bool:
    """Whether the backward pass that runs in this thread keeps its graph."""
    return vars(torch._C)["_autograd"]._get_current_graph_task_keep_graph()


class Operators(TorchDispatchMode):
    """Within it, a function runs each operator, also those of which a TorchFunctionMode
    sees nothing.

    Args:
        run: an operator with its arguments.
    """

    def __init__(self, run: Callable[[Any, Any, dict[str, Any]], Any]) -> None:
        super().__init__()
        self._run = run

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return self._run(func, args, kwargs or {})


def without_hooks() -> AbstractContextManager[None]:
    """A context whose graphs do not pass the hooks on saved tensors that are around, as
    checkpoints have them."""
    top = vars(torch._C)["_autograd"]._top_saved_tensors_default_hooks(True)
    if top is None:
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(_itself, _itself)


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def is_apart(module: DistributedDataParallel) -> bool:
    """Whether DDP's last forward pass ran under `no_sync()`, so that its backward pass
    leaves gradients on their ranks, even if that runs outside of `no_sync()`."""
    return not module.require_forward_param_sync


def send_forward_messages(module: DistributedDataParallel) -> None:
    """Send now what DDP's next forward pass would send first: the buffers of the first
    rank, and once the order of its buckets. All ranks must call it."""
    if module.reducer._rebuild_buckets():
        module._has_rebuilt_buckets = True
    module.require_forward_param_sync = True
    if module._check_sync_bufs_pre_fwd():
        module._sync_buffers()
    module.require_forward_param_sync = False


def owe_forward_messages(module: DistributedDataParallel) -> None:
    """Let DDP's next forward pass send the first rank's buffers, as after a backward
    pass that has communicated."""
    module.require_forward_param_sync = True


def has_reduced(module: DistributedDataParallel) -> bool:
    """Whether DDP's last backward pass with communication has averaged all gradients;
    not if DDP still waits for a parameter that took no part in the pass."""
    try:
        module._check_reducer_finalized()
    except RuntimeError:
        return False
    return True


@contextlib.contextmanager
def alone_among_ranks() -> Iterator[None]:
    """Within it, this process is the only rank of the default group, and exchanges with
    no other; a group that is named keeps its ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    own: Any = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    world: Any = dist.GroupMember
    everybody, world.WORLD = world.WORLD, own
    try:
        yield
    finally:
        world.WORLD = everybody
        dist.destroy_process_group(own)


def communication_hooks(module: DistributedDataParallel) -> list[Any]:
    """The hooks that have been registered in place of DDP's all-reduce."""
    return [hook for hook, _ in module._comm_hooks]


def ignored_names(module: DistributedDataParallel) -> set[str]:
    """The names of the parameters that DDP ignores."""
    return set(module.parameters_to_ignore)


def inside_wrappers(module: nn.Module) -> nn.Module:
    """The user's own module, whose parameter names do not depend on the ranks."""
    while True:
        inner: nn.Module | None = module._modules.get("_orig_mod")  # torch.compile
        if inner is None:
            inner = module._modules.get("_forward_module")  # Fabric
        if isinstance(module, DistributedDataParallel):
            inner = module.module
        if inner is None:
            return module
        module = inner


def _groups(state: Any) -> list[Any]:
    """The groups of a module: several since torch 2.12, one before."""
    several = getattr(state, "_fsdp_param_groups", None)
    if several is not None:
        return several
    return [group] if (group := state._fsdp_param_group) is not None else []


transform: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack  # pyright: ignore
"""The transform of torch.func that runs, such as `grad` or `vmap`; None if none."""


version_of: Callable[[Tensor], int] = attrgetter("_version")
"""How often a tensor has been changed in place, as autograd counts it."""


def has_gradient_hook(tensor: Tensor) -> bool:
    """Whether `register_hook` or `register_post_accumulate_grad_hook` was called."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def backward_in_modes(
    tensors: Any,
    gradient: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
    *,
    grad_tensors: Any = None,
) -> None:
    """`loss.backward()` or `torch.autograd.backward(tensors, grad_tensors)`, in which
    function modes see forward passes that run again."""
    several = _several(tensors)
    given = _several(gradient if grad_tensors is None else grad_tensors)
    gradients = given or (None,) * len(several)
    torch.autograd.Variable._execution_engine.run_backward(
        several,
        tuple(
            torch.ones_like(each) if own is None and each.requires_grad else own
            for each, own in zip(several, gradients, strict=True)
        ),
        create_graph if retain_graph is None else retain_graph,
        create_graph,
        _several(inputs),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def _several(tensors: Any) -> tuple[Any, ...]:
    if tensors is None:
        return ()
    return (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)


uncompiled = torch._disable_dynamo  # pyright: ignore[reportPrivateImportUsage]
"""Marks a function that `torch.compile` must run as it is. The public
`torch.compiler.disable` would load the compiler at once."""
