"""Private parts of torch that the core needs. Each function has a test."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.backends import cuda as backends
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize


def gradient_divide_factors(module: nn.Module) -> set[float | None]:
    """What FSDP2 divides summed gradients by; None means by the number of ranks.

    `set_gradient_divide_factor` sets it, and no public function returns it.
    """
    states: list[Any] = [
        m._get_fsdp_state() for m in module.modules() if isinstance(m, FSDPModule)
    ]
    groups = [group for state in states for group in _groups(state)]
    return {getattr(group, "gradient_divide_factor", None) for group in groups}


def backward_pass() -> int:
    """The number of the backward pass that runs in this thread; -1 for none.

    Passes may run within each other: torch's checkpoints ask for the same number.
    """
    return torch._C._current_graph_task_id()


def is_transformed() -> bool:
    """Whether a transform of torch.func, such as `grad` or `vmap`, runs."""
    return torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore


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


def communication_hooks(module: DistributedDataParallel) -> list[Any]:
    """The hooks that have been registered in place of DDP's all-reduce."""
    return [hook for hook, _ in module._comm_hooks]


def ignored_names(module: DistributedDataParallel) -> set[str]:
    """The names of the parameters that DDP ignores."""
    return set(module.parameters_to_ignore)


def is_joining(module: DistributedDataParallel) -> bool:
    """Whether DDP runs inside its `join()`, for ranks of unequal length."""
    return module._join_config.enable


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


LAST_RATES = "_last_lr"
"""Where torch's schedulers keep what `get_last_lr()` returns."""


def nested_schedulers(scheduler: Any) -> list[Any]:
    """The schedulers inside a `SequentialLR` or a `ChainedScheduler`."""
    return list(getattr(scheduler, "_schedulers", ()))


def scheduler_milestones(scheduler: Any) -> list[int]:
    """The steps at which a `SequentialLR` goes to its second scheduler, third, ..."""
    return scheduler._milestones


def versions_of(tensors: Iterable[Tensor]) -> list[int]:
    """How often each tensor has been changed in place, as autograd counts it."""
    return [tensor._version for tensor in tensors]


def has_gradient_hook(tensor: Tensor) -> bool:
    """Whether `register_hook` or `register_post_accumulate_grad_hook` was called."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


@contextlib.contextmanager
def without_gradient_hooks(
    tensors: Iterable[Tensor],
) -> Iterator[Callable[[], None]]:
    """Within it, what `register_hook` and `register_post_accumulate_grad_hook` have
    registered does not run. It yields what takes off those registered meanwhile."""
    listed = list(tensors)
    kept = [(hooks, dict(hooks)) for hooks in _gradient_hooks(listed)]

    def clear() -> None:
        for hooks in _gradient_hooks(listed):
            hooks.clear()

    clear()
    try:
        yield clear
    finally:
        clear()
        for hooks, before in kept:
            hooks.update(before)


def _gradient_hooks(tensors: Iterable[Tensor]) -> list[dict[int, Any]]:
    each = ((t._backward_hooks, t._post_accumulate_grad_hooks) for t in tensors)
    return [hooks for pair in each for hooks in pair if hooks]


def backward_in_modes(
    loss: Tensor,
    gradient: Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """`loss.backward()`, in which function modes see forward passes that run again."""
    if inputs is not None:
        torch.autograd.backward(
            loss, gradient, retain_graph, create_graph, inputs=inputs
        )
        return
    torch.autograd.Variable._execution_engine.run_backward(
        (loss,),
        (torch.ones_like(loss) if gradient is None else gradient,),
        create_graph if retain_graph is None else retain_graph,
        create_graph,
        (),
        allow_unreachable=True,
        accumulate_grad=True,
    )


uncompiled = torch._disable_dynamo  # pyright: ignore[reportPrivateImportUsage]
"""Marks a function that `torch.compile` must run as it is. The public
`torch.compiler.disable` would load the compiler at once."""


ATTENTION = "flash", "mem_efficient", "math", "cudnn"
"""The kernels of attention."""


def settings_of_thread() -> Callable[[], None]:
    """What torch holds for a thread or the process, and contexts set: gradients on or
    off, autocast, the hooks on saved tensors, the default type of numbers, the kernels
    of attention, the stream. Returns what puts it back.

    The hooks are taken off, so that a function that runs meanwhile has its own.
    """
    own: Any = vars(torch._C)["_autograd"]
    hooks = []
    while (top := own._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(top)
        own._pop_saved_tensors_default_hooks()
    kinds = [each for each in ("cpu", "cuda") if each == "cpu" or _has_cuda()]
    casts = [
        (each, torch.is_autocast_enabled(each), torch.get_autocast_dtype(each))
        for each in kinds
    ]
    gradients, caches = torch.is_grad_enabled(), torch.is_autocast_cache_enabled()
    numbers = torch.get_default_dtype()
    kernels = {k: getattr(backends, f"{k}_sdp_enabled")() for k in ATTENTION}
    stream = torch.cuda.current_stream() if _has_cuda() else None

    def put_back() -> None:
        while own._top_saved_tensors_default_hooks(True) is not None:
            own._pop_saved_tensors_default_hooks()
        for pack, unpack in reversed(hooks):
            own._push_saved_tensors_default_hooks(pack, unpack)
        for kind, is_on, dtype in casts:
            torch.set_autocast_enabled(kind, is_on)
            torch.set_autocast_dtype(kind, dtype)
        torch._C._set_grad_enabled(gradients)
        torch.set_autocast_cache_enabled(caches)
        if torch.get_default_dtype() != numbers:
            torch.set_default_dtype(numbers)
        for kernel, was_on in kernels.items():
            getattr(backends, f"enable_{kernel}_sdp")(was_on)
        if stream is not None:
            torch.cuda.set_stream(stream)

    return put_back


def _has_cuda() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()


def num_modes() -> int:
    """How many function and dispatch modes are open in this thread."""
    functions = torch._C._len_torch_function_stack()
    return functions + torch._C._len_torch_dispatch_stack()


@contextlib.contextmanager
def uncached_weights() -> Iterator[None]:
    """Within it, a `torch.nn.utils.parametrize.cached()` around it has no effect: each
    graph computes the weights that it needs."""
    before = parametrize._cache_enabled
    parametrize._cache_enabled = 0
    try:
        yield
    finally:
        parametrize._cache_enabled = before


def has_hooks_for_all() -> bool:
    """Whether a forward or backward hook is registered for all modules, as
    `register_module_forward_hook` of torch.nn.modules.module does."""
    kinds = "forward_hooks", "backward_hooks", "backward_pre_hooks"
    return any(getattr(torch.nn.modules.module, f"_global_{each}") for each in kinds)
