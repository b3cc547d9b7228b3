"""The functions of torch by their names: what may be asked, written, or not be done."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.nn.functional as F

ASKED = frozenset(
    """
    shape size dim ndim ndimension dtype device layout numel nelement stride itemsize
    element_size nbytes get_device is_floating_point is_complex is_signed is_contiguous
    is_cuda is_cpu is_mps is_xpu is_meta is_sparse is_sparse_csr is_quantized is_nested
    is_mkldnn is_conj is_neg is_inference is_same_size is_pinned storage_offset names
    result_type can_cast
    """.split()
)
"""What Python may ask of a value."""

SIZED = frozenset(
    """
    view reshape expand broadcast_to zeros ones empty rand randn repeat unflatten
    new_zeros new_ones new_empty tile
    """.split()
)
"""The functions to which a number of rows may be given."""

LIKE = frozenset("to type_as new_zeros new_ones new_empty new_full new_tensor".split())
"""Functions that take no more than type and device of a value, if there are no rows in
what they return."""

GRAPH = "gradients are not to be had where chunks run again"
REFUSED = {
    **dict.fromkeys(["register_hook", "retain_grad", "backward", "grad"], GRAPH),
    **dict.fromkeys(["detach_", "requires_grad_", "data.__set__", "set_"], GRAPH),
    "__len__": "write x.shape[0] for len(x)",
    "__bool__": "use torch.where()",
}
"""What cannot be repeated, and why, or what to do; so it is with all that returns no
tensor."""

OTHERS = frozenset(["native_batch_norm", "_native_batch_norm_legit"])
"""Ways to normalise by the batch that are no `batch_norm`."""


def name_of(function: Any) -> str:
    """The name of a function, method or attribute of torch."""
    name = getattr(function, "__name__", str(function))
    if name in ("__get__", "__set__", "__delete__"):
        of = getattr(getattr(function, "__self__", None), "__name__", "attribute")
        return of if name == "__get__" else f"{of}.{name}"
    return name


def may_write(name: str, args: Any, kwargs: Any) -> bool:
    """Whether a call may write into one of its arguments."""
    is_method = name.endswith("_") and not name.endswith("__")
    flags = [*args, *kwargs.values()]  # such as inplace=True
    is_told = "out" in kwargs or any(flag is True for flag in flags)
    return is_method or name == "__setitem__" or is_told


class Norm(NamedTuple):
    """A call that normalises by the batch."""

    x: Any
    running_mean: Any
    running_var: Any
    weight: Any
    bias: Any
    momentum: float
    eps: float


def norm_of(function: Any, name: str, args: Any, kwargs: Any) -> Norm | None:
    """What a call of `batch_norm` in training mode is given; None for other calls."""
    if name != "batch_norm":
        return None
    names = ["input", "running_mean", "running_var", "weight", "bias", "training"]
    if function is not F.batch_norm:
        names = ["input", "weight", "bias", "running_mean", "running_var", "training"]
    names += ["momentum", "eps", "cudnn_enabled"]
    given = {"weight": None, "bias": None, "training": False, "momentum": 0.1}
    given |= {"eps": 1e-5, **dict(zip(names, args, strict=False)), **kwargs}
    if not given["training"]:
        return None
    return Norm(given["input"], *(given[name] for name in Norm._fields[1:]))


def is_other_norm(name: str, args: Any, kwargs: Any) -> bool:
    """Whether a call normalises by the batch, or moves statistics, in another way."""
    if name == "instance_norm":
        return (
            kwargs.get("running_mean", args[1] if len(args) > 1 else None) is not None
        )
    return name in OTHERS
