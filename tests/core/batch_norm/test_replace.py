"""Other layers in BatchNorm's place carry its weights over."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.core.batch_norm.nets import ResNet, images
from trainkit.core.batch_norm.layers import every_layer
from trainkit.core.batch_norm.replace import num_groups, to_group_norm
from trainkit.errors import TrainkitError


@pytest.mark.parametrize("at_most", [1, 8, 100])
@pytest.mark.parametrize("channels", [1, 3, 7, 8, 10, 48, 256])
def test_groups_divide_the_channels_and_hold_four(channels: int, at_most: int) -> None:
    """Wu and He 2018: 32 groups; also groups of at least four channels."""
    groups = num_groups(channels, at_most=at_most)
    assert channels % groups == 0
    assert 1 <= groups <= at_most
    assert groups == 1 or channels // groups >= 4
    finer = [g for g in range(groups + 1, min(at_most, channels) + 1)]
    assert not any(channels % g == 0 and channels // g >= 4 for g in finer)


def test_group_norm_of_a_resnet_holds_the_same_parameters() -> None:
    net = ResNet()
    layers = every_layer(net)
    parameters = dict(net.named_parameters())
    made = to_group_norm(net)
    assert made.keys() == layers.keys()
    assert every_layer(net) == {}
    assert [*net.named_parameters()] == [*parameters.items()]
    for name, new in made.items():
        assert isinstance(new, nn.GroupNorm)
        assert new is net.get_submodule(name)
        assert new.weight is layers[name].weight
        assert new.bias is layers[name].bias
        assert new.eps == layers[name].eps
        assert new.affine is layers[name].affine


def test_group_norm_equals_torch_on_the_same_input() -> None:
    x = images(5).repeat(1, 8, 1, 1)
    layer = nn.BatchNorm2d(8).double()
    nn.init.normal_(layer.weight)
    nn.init.normal_(layer.bias)
    net = nn.Sequential(layer)
    to_group_norm(net)
    wanted = nn.functional.group_norm(x, 2, layer.weight, layer.bias)
    torch.testing.assert_close(net(x), wanted)


def test_group_norm_does_not_depend_on_the_other_rows() -> None:
    """The negative control: BatchNorm does."""
    x = images()
    for net, replaced in ((ResNet(), True), (ResNet(), False)):
        if replaced:
            to_group_norm(net)
        off = (net(x)[:4] - net(x[:4])).abs().max().item()
        assert off < 1e-12 if replaced else off > 1e-2


def test_shared_layer_is_replaced_once_at_all_its_places() -> None:
    layer = nn.BatchNorm1d(8)
    net: Any = nn.ModuleDict(
        {"a": layer, "b": nn.Sequential(nn.Linear(8, 8), layer), "c": nn.ReLU()}
    )
    made = to_group_norm(net)
    assert list(made) == ["a"]
    assert net["a"] is net["b"][1] is made["a"]


def test_layers_that_do_not_train_stay_and_others_keep_their_mode() -> None:
    net = ResNet()
    net.layers[0].eval()
    to_group_norm(net)
    assert {n.split(".")[0] for n in every_layer(net)} == {"layers"}
    assert len(every_layer(net)) == 3
    made = to_group_norm(ResNet().eval())
    assert len(made) == 9
    assert not any(layer.training for layer in made.values())


@pytest.mark.parametrize("affine", [True, False])
def test_lazy_layer_is_refused_by_name_until_it_has_seen_a_batch(affine: bool) -> None:
    net = nn.Sequential(nn.Sequential(nn.LazyBatchNorm2d(affine=affine)))
    with pytest.raises(TrainkitError, match=r"0\.0 is lazy \(LazyBatchNorm"):
        to_group_norm(net)
    net(torch.randn(2, 8, 3, 3))
    assert isinstance(to_group_norm(net)["0.0"], nn.GroupNorm)
