"""A frozen layer stays frozen, whoever calls `train()`."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from tests.core.batch_norm.nets import ResNet, furthest, images, statistics
from trainkit.core.batch_norm.freeze import freeze, thaw
from trainkit.core.batch_norm.layers import every_layer


def frozen_net() -> ResNet:
    net = ResNet()
    for layer in every_layer(net).values():
        freeze(layer)
    return net


def through_pickle(net: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(net))


def through_torch_save(net: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "thawing",
    [
        lambda net: net.train(),
        lambda net: net.train(True),
        lambda net: net.eval().train(),
        lambda net: net.stem_bn.train(),
        lambda net: net.layers.train(mode=True),
    ],
)
def test_no_call_of_train_thaws_a_frozen_layer(thawing) -> None:
    net = frozen_net()
    before = statistics(net)
    thawing(net)
    net(images())
    assert not any(layer.training for layer in every_layer(net).values())
    assert furthest(statistics(net), before) == 0


def test_train_thaws_what_only_eval_has_stopped() -> None:
    """The negative control, and what users of Lightning have always stumbled over."""
    net = ResNet()
    net.stem_bn.eval()
    before = statistics(net)
    net.train()
    net(images())
    assert furthest(statistics(net), before) > 0.1


@pytest.mark.parametrize("again", [copy.deepcopy, through_pickle, through_torch_save])
def test_copy_of_a_frozen_net_is_frozen_and_its_own(again) -> None:
    net = frozen_net()
    twin = again(net)
    twin.train()
    for name, layer in every_layer(twin).items():
        assert not layer.training
        assert layer.train() is layer  # and not the layer that it was copied from
        thaw(layer)
        assert layer.training
        assert not every_layer(net)[name].training


def test_thawed_layer_trains_as_before() -> None:
    net = frozen_net()
    for layer in every_layer(net).values():
        thaw(layer)
    net.train()
    assert all(layer.training for layer in every_layer(net).values())
    net.eval()
    assert not any(layer.training for layer in every_layer(net).values())


def test_frozen_layer_leaves_the_state_dict_as_it_was() -> None:
    assert frozen_net().state_dict().keys() == ResNet().state_dict().keys()
