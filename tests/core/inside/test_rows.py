"""Rows that see each other, or count each other, are refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.core.inside.common import Net, batch, twin
from trainkit import Chunked, TrainkitError


class Counting(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / len(x)


class Placed(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.arange(1, len(x) + 1)[:, None]


class Mixing(Net):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out - out.mean(0)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Counting, "depends on the number of rows"),
        (Placed, "depends on the row's place"),
        (Mixing, "depends on other rows"),
    ],
)
def test_a_row_that_does_not_stand_alone_is_refused(kind: type[Net], why: str) -> None:
    net, (x, _) = twin(kind()), batch()
    with Chunked(net, size=4), pytest.raises(TrainkitError, match=why):
        net(x)


class Capacity(Net):
    """Serves the first 6 rows, as an expert of fixed capacity does."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out * (torch.arange(len(x)) < 6)[:, None]


def test_a_capacity_that_a_few_rows_do_not_show_is_refused() -> None:
    net, (x, _) = twin(Capacity()), batch()
    with Chunked(net, size=4), pytest.raises(TrainkitError, match="for 7 rows is not"):
        net(x)
