"""Which layers accumulation concerns; how they are frozen, and replaced."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn

from tests.zoo.callbacks import SENT
from tests.zoo.small_resnet import ResNet, furthest, images, statistics
from trainkit.core.batch_norm.layers import (
    every_layer,
    freeze,
    is_training,
    layers_to_train,
    listed,
    momentum_per_micro_batch,
    num_groups,
    num_sharing_ranks,
    thaw,
    to_group_norm,
)
from trainkit.errors import TrainkitError

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


@pytest.mark.parametrize("again", [*SENT.values(), saved])
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
    second = nn.Sequential(nn.Linear(8, 8), layer)
    net: Any = nn.ModuleDict({"a": layer, "b": second, "c": nn.ReLU()})
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
    with pytest.raises(TrainkitError, match=r"0\.0 is a LazyBatchNorm2d.* it is lazy"):
        to_group_norm(net)
    net(torch.randn(2, 8, 3, 3))
    assert isinstance(to_group_norm(net)["0.0"], nn.GroupNorm)
