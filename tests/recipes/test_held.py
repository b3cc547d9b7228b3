"""What the graph of a training step holds."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor, nn

from recipes.held import MB, HeldMemory
from trainkit import Chunked


class Logged(nn.Module):
    """Two layers, and the number that was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 64, bias=False), nn.Sigmoid())
        self.logged = 0.0

    def log(self, name: str, value: float) -> None:
        self.logged = value


def held(module: Logged, rows: Tensor, callback: HeldMemory) -> float:
    """In bytes, in the backward pass too."""
    callback.on_train_batch_start(SimpleNamespace(), module, None, 0)
    module.net(rows).sum().backward()
    callback.on_train_batch_end(SimpleNamespace(), module)
    return module.logged * MB


def test_it_counts_what_is_held_at_one_time() -> None:
    """The rows, and the output of the last layer: once, and not for two steps."""
    rows, callback = torch.randn(32, 8), HeldMemory(2)
    module = Logged()
    whole = rows.nbytes + 32 * 64 * 4
    assert held(module, rows, callback) == whole
    assert held(module, rows, callback) == whole
    assert callback._held == 0
    assert held(module, rows.repeat(9, 1), callback) == whole  # measured no more


def test_chunks_hold_less() -> None:
    rows, module = torch.randn(32, 8), Logged()
    with Chunked(module.net, size=4):
        found = held(module, rows, HeldMemory())
    # The sum holds nothing, and a chunk's rows are a view of all rows.
    assert found == rows.nbytes + 4 * 64 * 4
