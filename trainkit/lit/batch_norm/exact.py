"""The policy by which BatchNorm sees whole windows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torchmetrics import Metric, MetricCollection

from trainkit.core.batch_norm.layers import BatchNorm, listed, normalising_by_batch
from trainkit.core.split.micro_batching import SELF, MicroBatching
from trainkit.errors import TrainkitError
from trainkit.lit._compat import has_own, skips_backward
from trainkit.lit.batch_norm.policies import Policy, Window
from trainkit.lit.batch_size import micro_batch_of, num_replicas
from trainkit.lit.callback.base import windows_of


class ExactStatistics(Policy):
    """Normalises by the statistics of the whole window, on all ranks."""

    def begin(self, trainer: Any, module: Any) -> None:
        windows = windows_of(trainer)
        if not any(isinstance(each, BatchNorm) for each in module.modules()):
            return
        # Layers that are frozen now may train in a later window.
        if windows is not None:
            windows.join_statistics(module)
        elif num_replicas(trainer) > 1:
            raise TrainkitError(
                "BatchNormGuard('exact'): on several ranks it needs the callback that "
                "sums gradients exactly. Add AccumulationCallback(...), or use "
                "Trainer(sync_batchnorm=True) where a window is one batch."
            )

    def open_window(self, window: Window) -> None:
        # Without backward passes, each loader batch is complete by itself.
        if not skips_backward(window.trainer) and normalising_by_batch(window.module):
            _refuse_several(window.trainer, window.module)

    def summary(self, num_layers: int) -> str:
        return "normalised by the whole window, on all ranks"


def _refuse_several(trainer: Any, module: Any) -> None:
    """Refuse windows of which only a part is at hand at a time."""
    windows, size = windows_of(trainer), trainer.accumulate_grad_batches
    is_manual = not module.automatic_optimization
    has_inside = windows is not None and windows.inside is not None
    if size > 1 or is_manual and not has_inside:
        how = "manual optimization" if is_manual else f"{size} loader batches"
        rows = micro_batch_of(trainer.train_dataloader)
        now = "" if rows is None else f", {rows * size} in place of {rows} rows"
        raise _refusal(
            module,
            f"here it is made by {how}. Let the loader yield the whole window"
            f"{now} (batch_size), set accumulate_grad_batches=1, and cut it",
        )


def cut_inside(
    trainer: Any,
    pl_module: nn.Module,
    callbacks: Sequence[Any],
    options: MicroBatching | None,
) -> MicroBatching | None:
    """The options by which a loader batch is cut; inside the step where exact BatchNorm
    needs all of it, and it was to be cut on the host.

    Args:
        trainer: in `fit`.
        pl_module: what trains.
        callbacks: the user's, a `BatchNormGuard("exact")` perhaps among them.
        options: as the user gives them.
    """
    is_exact = any(getattr(each, "is_exact", False) for each in callbacks)
    if not is_exact or options is None or options.inside is not None:
        return options
    paths = tuple(_holders(pl_module, ""))
    if not paths:
        return options
    if options.is_auto and trainer.world_size > 1:
        raise TrainkitError(
            "BatchNormGuard('exact'): its layers communicate in forward passes, and a "
            "rank whose memory runs out inside one leaves the others waiting, so a "
            "size cannot be tried. Say it: MicroBatching(size=4)."
        )
    if options.tokens is not None or options.collate is not None:
        raise TrainkitError(
            f"BatchNormGuard('exact'): statistics are those of rows and their padding, "
            f"so loader batches are cut by rows alone, received {options!r}. Write "
            f"MicroBatching(size=4), and let the loader collate."
        )
    own = [n for n in paths if isinstance(pl_module.get_submodule(n), BatchNorm)]
    if own and has_own(pl_module, "forward"):
        paths = (SELF,)
    elif own:
        others = [name for name in paths if name not in own]
        more = f" Here {listed(others)} can be named." if others else ""
        raise TrainkitError(
            f"BatchNormGuard('exact'): {type(pl_module).__name__} calls {listed(own)} "
            f"in its own step, and no part of a step can be cut but its forward() or "
            f"a submodule that it calls with rows. Put such layers into one that holds "
            f"what comes before and after them, and name it: "
            f"MicroBatching(inside='net', size=4).{more}"
        )
    return replace(options, inside=paths, shared=(), lengths=None)


def _holders(module: nn.Module, path: str) -> Iterator[str]:
    """The paths of the children that hold BatchNorm; those of a list one by one."""
    for name, child in module.named_children():
        where = f"{path}.{name}".lstrip(".")
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _holders(child, where)
        elif not isinstance(child, Metric | MetricCollection):
            if any(isinstance(each, BatchNorm) for each in child.modules()):
                yield where


def _refusal(pl_module: nn.Module, why: str) -> TrainkitError:
    paths = list(_holders(pl_module, ""))
    inside = repr(paths[0] if len(paths) == 1 else tuple(paths))
    return TrainkitError(
        f"BatchNormGuard('exact'): a window must be one loader batch, so that all of "
        f"it is at hand before the first backward pass, and {why}: "
        f"MicroBatching(size=4), which is MicroBatching(inside={inside}, size=4) here."
    )
