"""What to do about a module that does not run in chunks of rows as it should."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    FlatParameter,
    FSDPModule,
    FullyShardedDataParallel,
)
from torch.nn.parameter import is_lazy

from trainkit.core.batch_norm.layers import BatchNorm, listed, normalising_by_batch
from trainkit.core.inside.call import Call
from trainkit.core.inside.outputs import Unfit
from trainkit.errors import TrainkitError

HINTS = {
    r"of shape \[\], has no rows": "Compute that outside of it, and name a module "
    "within it that makes the hidden states{}",
    "told apart by": "Let it keep documents apart by what it is given (a model of "
    "transformers does without a cache: config.use_cache = False) and count positions "
    "within each, name in shared= what all of them need, or name a module within it{}; "
    "documents='off' does not cut between them",
    "": "Name in shared= the arguments that all rows need; or name a module within "
    "it{}, or one around it. Rows must be dimension 0 of its arguments, as with "
    "batch_first=True: stack lists of samples, and pack sequences inside of it. Chunks "
    "run without a graph first (write torch.enable_grad() around autograd.grad), and "
    "return no cache (use_cache=False)",
}
"""What to do, by a pattern of what was seen; the first that fits. {} is for names."""

OF_TOKENS = (
    "Every dimension of an argument that is as wide as the mask, {}, is cut, and the "
    "mask must mark tokens by 1 or True. Give other arguments another width, pass "
    "position_ids if rows are padded on the left, or cut by size= alone. "
)

SHARE = 0.1
"""A submodule that holds less of the parameters is not worth a name."""


def refusal(error: Exception, call: Call) -> TrainkitError:
    """The error for a call whose rows do not stand alone.

    Args:
        error: that shows it.
        call: of which some rows have run.
    """
    reason, of, arguments = str(error), call.cut, call.arguments
    if not isinstance(error, Unfit):
        reason = f"it does not run on fewer rows: {type(error).__name__}: {error}"
    cut, whole = [], []
    for index, path in enumerate(arguments.paths):
        path = re.sub(r"(\.\d+)+$", "", path)  # a list is one argument
        (cut if arguments.has_rows(index) else whole).append(path)
    cut, whole = (list(dict.fromkeys(each)) for each in (cut, whole))
    rest = f", and each chunk gets all of {listed(whole, at_most=9)}" if whole else ""
    by = arguments.by
    how = f"told apart by {by}" if by else "as long as the first tensor"
    said = (
        f"{of.name}: it cannot run in chunks of rows: {reason.rstrip('.')}. Its rows "
        f"are the {arguments.rows} of {listed(cut, at_most=9)}, {how}{rest}. "
    )
    if arguments.width:
        said += OF_TOKENS.format(arguments.width)
    hint = next(text for pattern, text in HINTS.items() if re.search(pattern, said))
    within = [repr(each) for each in paths_within(of.module, of.name)]
    names = f", such as {' and '.join(within)}" if within else ""
    if by:
        said = re.sub(r"\brow(s?)\b", r"document\1", said)
    return TrainkitError(f"{said}{hint.format(names)}.")


def paths_within(module: nn.Module, name: str) -> list[str]:
    """The paths of a module's large submodules, at most three; if some have submodules
    of their own, of these.

    Args:
        module: whose submodules they are.
        name: its own path.
    """
    before = "" if name == "self" or "(" in name else f"{name}."
    children = [
        (sum(p.numel() for p in child.parameters()), f"{before}{path}", child)
        for path, child in module.named_children()
        if type(child).forward is not nn.Module.forward
    ]
    least = SHARE * sum(p.numel() for p in module.parameters())
    large = [(path, child) for size, path, child in children if size > least]
    deep = [(path, child) for path, child in large if list(child.children())]
    return [path for path, _ in deep or large][:3]


def refuse_parts(
    module: nn.Module, name: str, reasons: Mapping[str, Callable[[str, Any], Any]]
) -> None:
    """Refuse a module with a part that cannot run in chunks of rows.

    Args:
        module: which is cut.
        name: of it, for messages.
        reasons: what to say of a part, and whether it is so of a path and its module.
    """
    for path, each in module.named_modules():
        for why, is_so in reasons.items():
            if is_so(path, each):
                raise TrainkitError(f"{name}: {path or 'it'} {why}.")


LAZY: dict[str, Callable[[str, Any], Any]] = {
    "has lazy parameters, which get their shape in a first forward pass. Run one batch "
    "before it is cut": lambda path, each: any(
        map(is_lazy, [*each._parameters.values(), *each._buffers.values()])
    ),
}
FLAT: Any = (FullyShardedDataParallel, FlatParameter)
OF_ROWS: dict[str, Callable[[str, Any], Any]] = {
    **LAZY,
    "is scripted, and cannot run in chunks. Give the module that was scripted": (
        lambda path, each: not path and isinstance(each, torch.jit.ScriptModule)
    ),
    "is sharded by fully_shard (FSDP2) for itself, and frees its weights in each "
    "chunk. Shard the module that is cut as one group, or one around it; or use DDP": (
        lambda path, each: path and isinstance(each, FSDPModule)
    ),
    "is flattened by FullyShardedDataParallel, which frees weights after each forward "
    "pass, so that chunks get no gradient. Shard by torch.distributed.fsdp.fully_shard "
    "(FSDP2; ModelParallelStrategy in Lightning), or use DDP": (
        lambda path, each: any(
            isinstance(x, FLAT) for x in [each, *each._parameters.values()]
        )
    ),
}
"""What the inner cut refuses."""

OF_CALLS: dict[str, Callable[[str, Any], Any]] = {
    "is a BatchNorm that normalises by all rows of a batch, and rows must not see each "
    'other. Freeze it, use BatchNormGuard("exact"), or name a module without it': (
        lambda path, each: bool(
            isinstance(each, BatchNorm) and normalising_by_batch(each)
        )
    ),
    **OF_ROWS,
}
"""What it refuses once it is called."""
