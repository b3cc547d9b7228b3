"""Saving an open window in a checkpoint, and loading it again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from trainkit.core._compat import inside_wrappers
from trainkit.core.nested import describe
from trainkit.core.ranks import Ranks
from trainkit.core.strategies import kind_of
from trainkit.core.wide_gradients import WideGradients
from trainkit.core.window import COLUMNS, COUNT, WEIGHT, merged, scalar
from trainkit.errors import TrainkitError


def save_state(accumulator: Any, *, over_ranks: bool) -> dict[str, Any]:
    """The open window of an accumulator: this rank's part, or all parts added up, which
    every rank must call, even without a micro-batch."""
    if accumulator.told is not None and accumulator.is_open:
        raise TrainkitError(
            "state_dict(): a window that expect() has announced is open, and what it "
            "still expects cannot be saved. Save before its first micro-batch, or "
            "after finish()."
        )
    ranks = accumulator.ranks if over_ranks else Ranks()
    division, module = accumulator.division, accumulator.module
    row = accumulator.window.row(accumulator.device)
    # A rank without a micro-batch has neither number, and sends zeros.
    own, opening = (
        scalar(0 if number is None else number, row.device)
        for number in (division.reference, division.opening)
    )
    table = ranks.gather_rows(torch.cat([row, torch.stack([own, opening])]))
    totals = merged(table)
    common, shared_factor = table[:, -2:].amax(0)
    state = {
        "num_windows": accumulator.num_windows,
        "strategy": kind_of(accumulator.strategy),
        "rank": None if over_ranks else accumulator.ranks.index,
        "totals": None,
        "reference": None if division.reference is None else own.cpu(),
        "factor": None,
        "gradients": {},
    }
    if not bool(totals[COUNT]):
        return state
    gradients: dict[str, Tensor] = {}
    if isinstance(module, nn.Module):
        # With aggregation="none", ranks have different r in their first window.
        named = inside_wrappers(module).named_parameters()
        held = holders(named, accumulator.gradients.wide)
        gradients = save_partial(held, ranks, scale=own / common)
        if totals[WEIGHT] > 0 and not gradients:
            raise TrainkitError(
                "state_dict: the window is open, and no parameter of `module` has a "
                "gradient. Pass the module that trains. Under FSDP, save after a "
                "backward pass with set_requires_gradient_sync(True)."
            )
    return {
        **state,
        # By name: a later version may order the columns differently.
        "totals": dict(zip(COLUMNS, totals.cpu().unbind(), strict=True)),
        "reference": common.cpu(),
        "factor": shared_factor.cpu() if bool(shared_factor) else None,
        "gradients": gradients,
    }


def load_state(accumulator: Any, state: Any) -> None:
    """Let an accumulator continue the window that `save_state` has saved."""
    if not isinstance(state, Mapping) or "totals" not in state:
        raise TrainkitError(
            f"load_state_dict(): must be what Accumulator.state_dict() has returned, "
            f"received {describe(state)}."
        )
    ranks, module, totals = accumulator.ranks, accumulator.module, state["totals"]
    if totals is not None:
        _refuse_other(state, ranks.index, kind_of(accumulator.strategy))
    if state["rank"] is not None:
        ranks = Ranks()  # it is this rank's own part
    accumulator.drop()
    accumulator.watch.forget()
    accumulator.num_windows = state["num_windows"]
    accumulator.division.restore(state["reference"], state["factor"])
    if state["gradients"] and isinstance(module, nn.Module):
        named = inside_wrappers(module).named_parameters()
        wide = accumulator.gradients.wide
        load_partial(holders(named, wide), state["gradients"], ranks)
    if totals is not None:
        # Open on every rank, since they must act alike; one has the totals.
        totals = torch.stack([totals[name] for name in COLUMNS]) * (ranks.index == 0)
        accumulator.window.carry(totals)
        accumulator.division.is_open = True


def _refuse_other(state: Mapping[str, Any], rank: int, strategy: str) -> None:
    """Refuse a window of another rank, or one that another strategy has weighed."""
    if state["rank"] not in (None, rank):
        raise TrainkitError(
            f"state_dict: it holds the open window of rank {state['rank']}, and "
            f"this is rank {rank}. Each rank must load its own part: save one "
            f"state for each rank, or one with over_ranks=True for all."
        )
    if state["strategy"] != strategy:
        raise TrainkitError(
            f"state_dict: its open window was weighed by {state['strategy']}, and "
            f"this accumulator weighs by {strategy}; such weights cannot be added up. "
            f"Resume with the strategy that was saved, or from a checkpoint between "
            f"two windows."
        )


def holders(
    named_parameters: Iterable[tuple[str, Tensor]], wide: WideGradients | None
) -> list[tuple[str, Tensor]]:
    """The tensors whose `grad` is the window's gradient so far, by name."""
    if wide is None:
        return list(named_parameters)
    own = {id(p) for p in wide.parameters}
    return [
        (name, wide.stand_in_of(p) if id(p) in own else p)
        for name, p in named_parameters
    ]


@torch.no_grad()
def save_partial(
    named_parameters: Iterable[tuple[str, Tensor]],
    ranks: Ranks,
    *,
    scale: Tensor | float = 1.0,
) -> dict[str, Tensor]:
    """The gradients of an open window on the CPU, by name, unsharded.

    Args:
        named_parameters: the parameters that train.
        ranks: the ranks whose gradients to add up; `Ranks()` saves only this rank's.
        scale: what to multiply this rank's gradients by before they are added up.
    """
    training = {name: p for name, p in named_parameters if p.requires_grad}
    saved = {}
    for name in _used_somewhere(training, ranks):
        parameter = training[name]
        mine = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if isinstance(mine, DTensor):
            total = mine.full_tensor() * ranks.multiplier  # FSDP has reduced it
        elif ranks.size > 1:
            total = ranks.sum_((mine.to_dense() if mine.is_sparse else mine) * scale)
            total = total.to_sparse(1) if mine.is_sparse else total
        else:
            total = mine
        # copy: on a CPU the checkpoint must not change when training continues
        saved[name] = total.detach().to("cpu", copy=True)
    return saved


@torch.no_grad()
def load_partial(
    named_parameters: Iterable[tuple[str, Tensor]],
    saved: Mapping[str, Tensor],
    ranks: Ranks,
) -> None:
    """Put the gradients of an open window back where `save_partial` found them.

    Args:
        named_parameters: the parameters that train.
        saved: what `save_partial` returned.
        ranks: the ranks to share the gradients out to, if they were added up over
            ranks: a sharded parameter gets its own part, any other an equal share.
    """
    own = dict(named_parameters)
    missing = sorted(saved.keys() - own.keys())
    if missing:
        raise TrainkitError(
            f"checkpoint: it holds partial gradients of {missing[:5]}, but the model "
            f"has no such parameter. Resume with the model that was saved, or from a "
            f"checkpoint taken between two optimizer steps."
        )
    for name, parameter in own.items():
        parameter.grad = None
        if name not in saved:
            continue
        whole = saved[name].to(parameter.device, parameter.dtype, copy=True)
        if isinstance(parameter, DTensor):
            parameter.grad = distribute_tensor(
                whole / ranks.multiplier, parameter.device_mesh, parameter.placements
            )
        else:
            # A share on each rank, not all of it on one: DDP does not reduce what the
            # rest of the window leaves unused, and the mean of equal shares is right.
            parameter.grad = whole / ranks.size


def _used_somewhere(parameters: Mapping[str, Tensor], ranks: Ranks) -> list[str]:
    """The names of parameters that have a gradient on any rank, alike on all ranks."""
    present = [p.grad is not None for p in parameters.values()]
    if ranks.size > 1 and parameters:
        device = next(iter(parameters.values())).device
        counts = ranks.sum_(torch.tensor(present, dtype=torch.int32, device=device))
        present = counts.tolist()
    return [name for name, used in zip(parameters, present, strict=True) if used]
