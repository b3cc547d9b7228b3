"""Which layers accumulation concerns, and how fast they forget."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.core.batch_norm.nets import ResNet
from trainkit.core.batch_norm.layers import (
    every_layer,
    layers_to_train,
    listed,
    momentum_per_micro_batch,
    num_sharing_ranks,
)


def test_layers_of_a_resnet_are_found_at_every_depth() -> None:
    assert list(every_layer(ResNet())) == [
        "stem_bn",
        *(
            f"layers.{i}.{name}"
            for i in (0, 1)
            for name in ("bn1", "bn2", "downsample.1")
        ),
        "line_bn",
        "head_bn",
    ]


@pytest.mark.parametrize(
    "kind",
    [
        lambda: nn.BatchNorm1d(4),
        lambda: nn.BatchNorm2d(4),
        lambda: nn.BatchNorm3d(4),
        lambda: nn.SyncBatchNorm(4),
        lambda: nn.LazyBatchNorm2d(),
        lambda: nn.BatchNorm2d(4, affine=False, momentum=None),
    ],
)
def test_every_kind_of_batch_norm_is_found(kind) -> None:
    assert list(layers_to_train(nn.Sequential(kind()))) == ["0"]


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm2d(4, track_running_stats=False),
        nn.InstanceNorm2d(4, track_running_stats=True),
        nn.GroupNorm(2, 4),
        nn.LayerNorm(4),
    ],
)
def test_layers_without_statistics_of_the_batch_are_not_found(layer) -> None:
    assert every_layer(nn.Sequential(layer)) == {}


def test_layers_in_evaluation_are_left_out_unless_the_whole_module_is() -> None:
    net = ResNet()
    net.layers[0].eval()
    assert not any(name.startswith("layers.0") for name in layers_to_train(net))
    assert len(layers_to_train(net)) == 6
    assert layers_to_train(net.eval()).keys() == every_layer(net).keys()


def test_shared_layer_is_found_once() -> None:
    layer = nn.BatchNorm1d(3)
    assert list(every_layer(nn.Sequential(layer, nn.ReLU(), layer))) == ["0"]


@pytest.mark.parametrize("num", [1, 2, 3, 7, 64, 1000])
@pytest.mark.parametrize("momentum", [1e-12, 1e-4, 0.1, 0.5, 0.99])
def test_n_updates_decay_as_one_of_the_big_batch(momentum: float, num: int) -> None:
    small = momentum_per_micro_batch(momentum, num)
    exact = torch.tensor(1 - momentum, dtype=torch.float64)
    assert float((1 - small) ** num) == pytest.approx(float(exact), abs=1e-13)
    if momentum <= 1e-4:  # nothing is lost for the smallest
        assert small == pytest.approx(momentum / num, rel=1e-4)


def test_momentum_of_one_stays_one() -> None:
    """Each micro-batch replaces all, as the big batch would."""
    assert momentum_per_micro_batch(1.0, 4) == 1.0


def test_momentum_of_zero_stays_zero() -> None:
    assert momentum_per_micro_batch(0.0, 4) == 0.0


def test_sharing_ranks_are_one_without_others() -> None:
    assert num_sharing_ranks(nn.SyncBatchNorm(2)) == 1
    assert num_sharing_ranks(nn.BatchNorm2d(2)) == 1


def test_sharing_ranks_are_those_of_synchronised_layers(monkeypatch) -> None:
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda group: 8)
    assert num_sharing_ranks(nn.SyncBatchNorm(2, process_group="some")) == 8
    assert num_sharing_ranks(nn.BatchNorm2d(2)) == 1


def test_listed_names_a_few_and_counts_the_rest() -> None:
    names = list("abcdefg")
    assert listed(names[:5]) == "a, b, c, d, e"
    assert listed(names) == "a, b, c, d, e and 2 more"
    assert listed(names, at_most=2) == "a, b and 5 more"
