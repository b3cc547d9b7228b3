"""Exact BatchNorm in many nets: loss, gradient and statistics of the big batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from tests.core.joins.cases import CASES, images, made
from tests.core.joins.common import (
    EXACT,
    NAIVE,
    SIZES,
    accumulated,
    any_loss,
    big,
    check_same,
    check_way,
    in_chunks,
    in_steps,
    off_by,
    summed,
)
from trainkit import exact_batch_norm
from trainkit.errors import TrainkitError

MEMORY = ["device", "flat"]
CUT = sorted(set(CASES) - {"a_layer"})


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("name", CUT)
def test_a_cut_batch_is_the_big_batch(name: str, memory: str) -> None:
    check_same(in_chunks(name, 11, 4, memory), big(name, 11, any_loss))


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("name", CASES)
def test_micro_batches_are_the_big_batch(name: str, memory: str) -> None:
    check_same(in_steps(name, SIZES["ragged"], memory), big(name, 11, summed))


@pytest.mark.parametrize("name", CUT)
def test_plain_accumulation_is_not(name: str) -> None:
    found, wanted = accumulated(name, [4, 4, 3]), big(name, 11, summed)
    assert off_by(found.gradients, wanted.gradients) > NAIVE


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("sizes", SIZES)
def test_any_sizes(sizes: str, memory: str) -> None:
    each = SIZES[sizes]
    check_same(in_steps("resnet18", each, memory), big("resnet18", sum(each), summed))


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("size", [1, 2, 7, 10])
def test_any_size_of_chunks(size: int, memory: str) -> None:
    check_same(in_chunks("unet", 11, size, memory), big("unet", 11, any_loss))


@pytest.mark.parametrize("memory", MEMORY)
def test_a_layer_alone_is_not_cut(memory: Any) -> None:
    net = exact_batch_norm(nn.BatchNorm2d(3), size=4, memory=memory)
    with pytest.raises(TrainkitError, match="a BatchNorm2d alone cannot be cut"):
        net(images())


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("door", ["size", "run"])
@pytest.mark.parametrize("name", ["resnet18", "unet", "mobilenet", "no_momentum"])
def test_ten_steps(name: str, door: str, memory: Any) -> None:
    trained = {"big": made(name), "found": made(name), "plain": made(name)}
    rate = 0.002 if door == "size" else 0.02  # rounding grows no faster so
    optimizers = {k: SGD(net.parameters(), rate) for k, net in trained.items()}
    size = 4 if door == "size" else None
    net = exact_batch_norm(trained["found"], size=size, memory=memory)
    loss = any_loss if door == "size" else summed
    for step in range(10):
        x = images(10 + step % 3, seed=step)
        loss([trained["big"](x)]).backward()
        for part in x.split(4):
            loss([trained["plain"](part)]).backward()
        if door == "size":
            loss([net(x)]).backward()
        else:
            sizes = [3, 1, 4, len(x) - 8]
            for _, found in net.run(lambda part: loss([net(part)]), x.split(sizes)):
                found.backward()
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
    check_way(net, memory)
    net.remove()
    big_, found_, plain_ = ([*n.state_dict().values()] for n in trained.values())
    for one, other in zip(found_, big_, strict=True):
        assert off_by([one], [other]) <= EXACT
    assert off_by(plain_, big_) > 1e-3


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("name", ["other_dims"])
def test_single_precision_where_activations_are_smooth(name: str, memory: str) -> None:
    wide = big(name, 11, summed)
    found = in_steps(name, SIZES["ragged"], memory, torch.float32)
    assert off_by(found.gradients, wide.gradients) <= 2e-5
    assert off_by(found.state, wide.state) <= 2e-5
