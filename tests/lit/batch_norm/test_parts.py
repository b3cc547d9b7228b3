"""A batch that is cut on its way to BatchNorm, and layers that see only some rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.lit.batch_norm.fits import At, ConvModule, batches, fit


class SomeRows(ConvModule):
    """A layer for the few rows that are routed to it."""

    def __init__(self, chosen: int) -> None:
        super().__init__()
        self.few = nn.BatchNorm1d(3).double()
        self.chosen = chosen

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch[0])
        few = self.few(logits[: self.chosen])
        rest = logits[self.chosen :]
        return F.cross_entropy(torch.cat([few, rest]), batch[1])


@pytest.mark.parametrize("policy", ["warn", "error", "momentum"])
def test_rows_left_out_are_not_taken_for_a_cut(policy: str) -> None:
    """The control of `test_effective_batch_made_by_cutting_is_told`: nothing
    accumulates here, and so nothing is said."""
    seen: list[float] = []
    note = At("on_train_batch_end", lambda t, m: seen.append(m.few.momentum))
    data = batches(rows=40, batch_size=20)
    fit(policy, note, module=SomeRows(5), data=data, accumulate=1)
    assert set(seen) == {0.1}


class NoRows(nn.BatchNorm1d):
    """Takes an empty part as it is, which torch does not."""

    def forward(self, input: Any) -> Any:
        return super().forward(input) if len(input) else input


def test_layer_that_sees_no_rows_stops_nothing() -> None:
    class Empty(SomeRows):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.few(batch[0].flatten(1)[:0, :3])
            return super().training_step(batch, batch_idx)

    module = Empty(5)
    module.few = layer = NoRows(3).double()
    fit("warn", module=module, data=batches(rows=40, batch_size=20), accumulate=1)
    assert layer.running_mean is not None
    assert bool((layer.running_mean != 0).all())
