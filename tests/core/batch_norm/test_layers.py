"""Which layers accumulation concerns, how fast they forget, and how they are frozen."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from tests.core.batch_norm.nets import ResNet, furthest, images, statistics
from trainkit.core.batch_norm.layers import (
    every_layer,
    freeze,
    is_training,
    layers_to_train,
    listed,
    momentum_per_micro_batch,
    num_sharing_ranks,
    thaw,
)

FOUND: dict[str, tuple[Any, bool]] = {
    "1d": (lambda: nn.BatchNorm1d(4), True),
    "3d": (lambda: nn.BatchNorm3d(4), True),
    "synchronised": (lambda: nn.SyncBatchNorm(4), True),
    "lazy": (nn.LazyBatchNorm2d, True),
    "bare": (lambda: nn.BatchNorm2d(4, affine=False, momentum=None), True),
    "no statistics": (lambda: nn.BatchNorm2d(4, track_running_stats=False), False),
    "instance": (lambda: nn.InstanceNorm2d(4, track_running_stats=True), False),
    "group": (lambda: nn.GroupNorm(2, 4), False),
    "layer": (lambda: nn.LayerNorm(4), False),
}


@pytest.mark.parametrize("kind", FOUND)
def test_layers_with_statistics_of_the_batch_are_found(kind: str) -> None:
    make, is_found = FOUND[kind]
    assert list(layers_to_train(nn.Sequential(make()))) == ["0"] * is_found


def test_layers_of_a_resnet_are_found_at_every_depth_and_once() -> None:
    names = ("bn1", "bn2", "downsample.1")
    blocks = [f"layers.{i}.{name}" for i in (0, 1) for name in names]
    assert list(every_layer(ResNet())) == ["stem_bn", *blocks, "line_bn", "head_bn"]
    layer = nn.BatchNorm1d(3)
    assert list(every_layer(nn.Sequential(layer, nn.ReLU(), layer))) == ["0"]


def test_layers_in_evaluation_are_left_out_unless_the_whole_module_is() -> None:
    net = ResNet()
    net.layers[0].eval()
    assert not any(name.startswith("layers.0") for name in layers_to_train(net))
    assert len(layers_to_train(net)) == 6
    assert layers_to_train(net.eval()).keys() == every_layer(net).keys()


def test_layer_is_training_when_it_follows_the_data() -> None:
    layer = nn.BatchNorm1d(3)
    assert is_training(layer)
    layer.track_running_stats = False
    assert not is_training(layer)
    layer.track_running_stats = True
    assert not is_training(layer.eval())


@pytest.mark.parametrize("num", [1, 3, 1000])
@pytest.mark.parametrize("momentum", [0.0, 1e-12, 1e-4, 0.1, 0.99, 1.0])
def test_n_updates_decay_as_one_of_the_big_batch(momentum: float, num: int) -> None:
    small = momentum_per_micro_batch(momentum, num)
    assert (1 - small) ** num == pytest.approx(1 - momentum, abs=1e-13)
    if momentum <= 1e-4:  # nothing is lost for the smallest
        assert small == pytest.approx(momentum / num, rel=1e-4)


def test_sharing_ranks_are_those_of_synchronised_layers(monkeypatch: Any) -> None:
    layers = nn.SyncBatchNorm(2, process_group="some"), nn.BatchNorm2d(2)
    assert [num_sharing_ranks(each) for each in layers] == [1, 1]
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda group: 8)
    assert [num_sharing_ranks(each) for each in layers] == [8, 1]


def test_listed_names_a_few_and_counts_the_rest() -> None:
    names = list("abcdefg")
    assert listed(names[:5]) == "a, b, c, d, e"
    assert listed(names) == "a, b, c, d, e and 2 more"
    assert listed(names, at_most=2) == "a, b and 5 more"


# ---- frozen --------------------------------------------------------------------------


def frozen_net() -> ResNet:
    net = ResNet()
    for layer in every_layer(net).values():
        freeze(layer)
    return net


@pytest.mark.parametrize("is_frozen", [True, False])
def test_no_call_of_train_thaws_a_frozen_layer(is_frozen: bool) -> None:
    """The control: it thaws what only `eval()` has stopped."""
    net = frozen_net() if is_frozen else ResNet().eval()
    before = statistics(net)
    net.eval().train()
    net.stem_bn.train()
    net.layers.train(mode=True)
    net(images())
    assert any(x.training for x in every_layer(net).values()) is not is_frozen
    off = furthest(statistics(net), before)
    assert off == 0 if is_frozen else off > 0.1


def saved(net: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net)), saved]
)
def test_copy_of_a_frozen_net_is_frozen_and_its_own(again: Any) -> None:
    net = frozen_net()
    twin = again(net)
    assert twin.state_dict().keys() == ResNet().state_dict().keys()
    twin.train()
    for name, layer in every_layer(twin).items():
        assert not layer.training
        assert layer.train() is layer  # and not the layer that it was copied from
        thaw(layer)
        assert layer.training
        assert not layer.eval().training
        assert not every_layer(net)[name].training
