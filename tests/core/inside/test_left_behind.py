"""What a forward pass leaves in attributes is refused or announced; caches are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.core.inside.common import WIDTH, Net, batch, gradient, off_by, twin
from trainkit import Chunked, TrainkitError


class Leaving(Net):
    """Leaves a balance term where the step picks it up."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place
        self.left: Any = {"tensor": None, "list": [], "dict": {}}[place]

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        term = out.softmax(-1).mean(0).square().sum()
        if self.place == "tensor":
            self.left = term
        elif self.place == "list":
            self.left.append(term)
        else:
            self.left["term"] = term
        return out


@pytest.mark.parametrize("place", ["tensor", "list", "dict"])
def test_a_term_left_in_an_attribute_is_refused_by_name(place: str) -> None:
    net, (x, _) = twin(Leaving(place)), batch()
    with Chunked(net, size=4), pytest.raises(TrainkitError, match="leaves tensors"):
        net(x)


def test_a_tensor_without_a_gradient_is_announced() -> None:
    class Watching(Net):
        def forward(self, x: Tensor) -> Tensor:
            self.largest = x.abs().max()
            return super().forward(x)

    net, (x, _) = twin(Watching()), batch()
    with Chunked(net, size=4), pytest.warns(UserWarning, match="values in largest"):
        net(x)


class Caching(Net):
    """Keeps a table that no row changes, as rotary embeddings do."""

    table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None or len(self.table) != x.shape[1]:
            self.table = torch.linspace(0, 1, x.shape[1], dtype=x.dtype)
        return super().forward(x + self.table)


def test_a_cache_is_no_such_tensor() -> None:
    net, (x, _) = twin(Caching()), batch()
    wanted = gradient(net, lambda net: net(x).std())[1]
    net.table = None
    with Chunked(net, size=4):
        found = gradient(net, lambda net: net(x).std())[1]
    assert off_by(found, wanted) <= 1e-12


def test_hooks_within_are_announced_and_the_module_s_own_are_not() -> None:
    net, (x, _) = nn.Sequential(nn.Linear(WIDTH, 3), nn.Tanh()).double(), batch()
    seen: list[int] = []
    net.register_forward_hook(lambda module, args, out: seen.append(len(out)))
    with Chunked(net, size=4):
        net(x)
    assert seen == [len(x)]
    net[0].register_forward_hook(lambda module, args, out: None)
    with Chunked(net, size=4), pytest.warns(UserWarning, match="hooks of 0"):
        net(x)
