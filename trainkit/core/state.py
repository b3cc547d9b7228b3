"""Saving an open window in a checkpoint, and loading it again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.core._compat import inside_wrappers
from trainkit.core.division import Streamed
from trainkit.core.gradients import load_partial, save_partial
from trainkit.core.ranks import Ranks
from trainkit.core.strategies import Weight
from trainkit.core.wide_gradients import WideGradients
from trainkit.core.window import merged
from trainkit.core.window_stats import COLUMNS, COUNT, WEIGHT
from trainkit.errors import TrainkitError


def save_window(
    row: Tensor,
    streamed: Streamed,
    module: Any,
    ranks: Ranks,
    *,
    wide: WideGradients | None = None,
) -> dict[str, Any]:
    """Return the totals and gradients of an open window, added up over ranks.

    Each of these ranks must call this, even without a micro-batch.

    Args:
        row: this rank's numbers.
        streamed: has this rank's r, and the scaler's factor in its gradients.
        module: the module that trains; anything else leaves gradients out.
        ranks: the ranks whose parts to add up; `Ranks()` is this rank alone.
        wide: has the gradients, if they are not in the parameters.
    """
    # A rank without a micro-batch has neither number, and sends zeros.
    own, carried = (
        row.new_zeros(()) if number is None else number.to(row)
        for number in (streamed.reference, streamed.opening)
    )
    table = ranks.gather_rows(torch.cat([row, torch.stack([own, carried])])).wait()
    totals = merged(table)
    common, shared_factor = table[:, -2:].amax(0)
    if not bool(totals[COUNT]):
        shown = None if streamed.reference is None else streamed.reference.cpu()
        return {"totals": None, "reference": shown, "factor": None, "gradients": {}}
    gradients: dict[str, Tensor] = {}
    if isinstance(module, nn.Module):
        # With aggregation="none", ranks have different r in their first window.
        named = holders(inside_wrappers(module).named_parameters(), wide)
        gradients = save_partial(named, ranks, scale=own / common)
        if totals[WEIGHT] > 0 and not gradients:
            raise TrainkitError(
                "state_dict: the window is open, and no parameter of `module` has a "
                "gradient. Pass the module that trains. Under FSDP, save after a "
                "backward pass with set_requires_gradient_sync(True)."
            )
    return {
        # By name: a later version may order the columns differently.
        "totals": dict(zip(COLUMNS, totals.cpu().unbind(), strict=True)),
        "reference": common.cpu(),
        "factor": shared_factor.cpu() if bool(shared_factor) else None,
        "gradients": gradients,
    }


def save_weights(weights: Tensor, ranks: Ranks) -> Tensor:
    """A table of micro-batch weights: a row for each rank, filled up with NaN.

    Each of these ranks must call this.
    """
    longest = ranks.gather_rows(weights.new_tensor([len(weights)])).wait().max()
    unused = weights.new_full((int(longest) - len(weights),), torch.nan)
    return ranks.gather_rows(torch.cat([weights, unused])).wait().cpu()


def load_weights(table: Tensor | None, ranks: Ranks) -> list[Weight]:
    """This rank's weights in a table that `save_weights` made.

    Empty if the number of ranks has changed, or if an older checkpoint has no table.
    """
    if table is None or len(table) != ranks.size:
        return []
    own = table[ranks.index]
    return own[~own.isnan()].tolist()


def load_window(
    state: dict[str, Any],
    module: Any,
    ranks: Ranks,
    *,
    wide: WideGradients | None = None,
) -> Tensor | None:
    """Put a saved window's gradients back; return this rank's share of its totals.

    Args:
        state: what `save_window` returned.
        module: the module that trains.
        ranks: the ranks that share it; `Ranks()` if it is this rank's own part.
        wide: gets the gradients, if they do not belong in the parameters.
    """
    if state["gradients"] and isinstance(module, nn.Module):
        named = holders(inside_wrappers(module).named_parameters(), wide)
        load_partial(named, state["gradients"], ranks)
    if state["totals"] is None:
        return None
    # The window is open on every rank, since they must act alike; one has the totals.
    totals = torch.stack([state["totals"][name] for name in COLUMNS])
    return totals * (ranks.index == 0)


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
