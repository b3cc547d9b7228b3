"""Statistics computed layer by layer equal those of all data as one batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.core.batch_norm.nets import (
    ROWS,
    ResNet,
    distance,
    furthest,
    images,
    of_big_batch,
    ragged,
    statistics,
)
from tests.core.conftest import OnRanks
from trainkit.core.batch_norm.freeze import freeze
from trainkit.core.batch_norm.layers import every_layer
from trainkit.core.batch_norm.recalibration import recalibrate
from trainkit.core.batch_norm.statistics import joined, statistics_of
from trainkit.core.ranks import find_ranks

EXACT = 1e-10
NAIVE = 1e-2
X = images()
CUTS = {
    "equal": [ROWS],
    "ragged": [4, 1, 7, 2, 9],
    "ones": [1] * ROWS,
    "last of one": [11, 11, 1],
}


def recalibrated(net: nn.Module, parts: list[Tensor], **options: Any) -> nn.Module:
    recalibrate(every_layer(net), lambda: parts, net, **options)
    return net


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("cut", CUTS)
def test_every_layer_equals_all_rows_as_one_batch(cut: str, training: bool) -> None:
    net = ResNet().train(training)
    net(X[:3])  # statistics of another time
    wanted = of_big_batch(net, X)
    recalibrated(net, ragged(X, CUTS[cut]))
    assert furthest(statistics(net), wanted) <= EXACT


def test_far_from_zero_in_single_precision_equals_double_precision() -> None:
    """A sum of squares less a squared sum would lose all digits here."""
    x = (torch.randn(64, 5) + 1e4).float()
    layer = nn.BatchNorm1d(5)
    recalibrated(nn.Sequential(layer), list(x.split(3)))
    torch.testing.assert_close(
        layer.running_var, x.double().var(0).float(), rtol=1e-3, atol=0
    )


def test_running_statistics_do_not_equal_those_of_all_rows() -> None:
    """The negative control: what BatchNorm has without being recalibrated."""
    net = ResNet()
    wanted = of_big_batch(net, X)
    for _ in range(50):
        for part in ragged(X, [4, 2, 7, 2, 8]):
            net(part)
    assert min(distance(statistics(net), wanted).values()) > NAIVE / 10
    assert furthest(statistics(net), wanted) > NAIVE


def test_one_pass_equals_in_the_first_layer_and_in_no_deeper_one() -> None:
    net = ResNet()
    wanted = of_big_batch(net, X)
    passes = recalibrate(
        every_layer(net), lambda: ragged(X, [4, 2, 7, 2, 8]), net, exact=False
    )
    assert passes == 1
    off = distance(statistics(net), wanted)
    assert off.pop("stem_bn.running_mean") <= EXACT
    assert off.pop("stem_bn.running_var") <= EXACT
    for name in ("layers.0.bn1", "layers.0.downsample.1", "layers.1.bn2", "head_bn"):
        assert off[f"{name}.running_var"] > NAIVE / 10


def test_passes_are_as_many_as_layers() -> None:
    net = ResNet()
    passes = recalibrate(every_layer(net), lambda: [X], net)
    assert passes == 9


@pytest.mark.parametrize("exact", [True, False])
def test_all_else_is_as_it_was(exact: bool) -> None:
    net = ResNet()
    net(X)
    net.layers[0].eval()
    net.stem.requires_grad_(False)
    net.head.weight.grad = torch.ones_like(net.head.weight)
    state = copy.deepcopy(net.state_dict())
    modes = {name: m.training for name, m in net.named_modules()}
    recalibrated(net, ragged(X), exact=exact)
    assert modes == {name: m.training for name, m in net.named_modules()}
    for name, tensor in net.state_dict().items():
        if "running" not in name:  # num_batches_tracked too
            assert torch.equal(tensor, state[name])
    assert torch.equal(net.head.weight.grad, torch.ones_like(net.head.weight))
    assert [n for n, p in net.named_parameters() if p.grad is not None] == [
        "head.weight"
    ]
    assert not any(m._forward_pre_hooks for m in net.modules())


def test_layers_left_out_stay_and_are_used_as_they_are() -> None:
    """A frozen layer normalises by its own statistics, before and after."""
    net = ResNet()
    net(X)
    freeze(every_layer(net)["layers.0.bn1"])
    before = statistics(net)
    layers = {n: x for n, x in every_layer(net).items() if n != "layers.0.bn1"}
    wanted = of_big_batch(net, X)  # a copy of the frozen layer is frozen as well
    recalibrate(layers, lambda: ragged(X), net)
    found = statistics(net)
    assert furthest(found, wanted) <= EXACT
    name = "layers.0.bn1.running_mean"
    assert torch.equal(found[name], before[name])


@pytest.mark.parametrize("exact", [True, False])
def test_forward_pass_that_raises_leaves_statistics_as_they_were(exact: bool) -> None:
    net = ResNet()
    net(X)
    before, calls = statistics(net), 0

    def breaks(x: Tensor) -> None:
        nonlocal calls
        calls += 1
        if calls > (25 if exact else 3):
            raise KeyError("a user's mistake")
        net(x)

    with pytest.raises(KeyError, match="a user's mistake"):
        recalibrate(every_layer(net), lambda: ragged(X), breaks, exact=exact)
    assert furthest(statistics(net), before) == 0
    assert all(layer.training for layer in every_layer(net).values())
    assert not any(m._forward_pre_hooks for m in net.modules())


# ---- odd nets ------------------------------------------------------------------------


class Siamese(nn.Module):
    """One layer at two places of the same depth, and one after them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Linear(3, 4), nn.Linear(3, 4)
        self.shared, self.after = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        left = self.shared(self.left(x))
        return self.after(torch.tanh(left) * self.shared(self.right(x)))


def rows_of_three(rows: int = 17) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(rows, 3, generator=generator, dtype=torch.float64) * 2 + 1


def test_layer_shared_at_one_depth_equals_both_its_inputs_together() -> None:
    net, x = Siamese(), rows_of_three()
    with torch.no_grad():
        both = torch.cat([net.left(x), net.right(x)])
    recalibrated(net, ragged(x, [5, 1, 8, 3]))
    torch.testing.assert_close(net.shared.running_mean, both.mean(0))
    torch.testing.assert_close(net.shared.running_var, both.var(0))
    var, mean = torch.var_mean(both, 0, correction=0)
    with torch.no_grad():
        left, right = (
            (branch(x) - mean) / (var + net.shared.eps).sqrt()
            for branch in (net.left, net.right)
        )
        y = torch.tanh(left) * right
    torch.testing.assert_close(net.after.running_mean, y.mean(0))
    torch.testing.assert_close(net.after.running_var, y.var(0))


class Odd(nn.Module):
    """Calls a layer by keyword, catches what is raised, and leaves one layer out."""

    unused: Any

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
        self.unused = nn.BatchNorm1d(3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        try:
            x = self.first(input=x)
        except Exception as error:
            raise AssertionError("nothing for the user to catch") from error
        return self.second(torch.sin(x))


@pytest.mark.parametrize("exact", [True, False])
def test_layer_called_by_keyword_and_one_never_called(exact: bool) -> None:
    net, x = Odd(), rows_of_three()
    net.unused.running_mean.fill_(7)
    wanted = of_big_batch(net, x)
    parts = ragged(x, [17] if not exact else [5, 1, 8, 3])
    recalibrated(net, parts, exact=exact)
    assert furthest(statistics(net), wanted) <= EXACT
    assert net.unused.running_mean.eq(7).all()


class Sometimes(nn.Module):
    """Leaves a layer out where there are few rows."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.rarely = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sin(self.always(x))
        return self.rarely(y) if len(x) > 3 else y


def test_layer_left_out_by_the_first_batches_is_recalibrated_too() -> None:
    net, x = Sometimes(), rows_of_three()
    recalibrated(net, ragged(x, [2, 3, 8, 4]))
    var, mean = torch.var_mean(x, 0, correction=0)
    y = torch.sin((x[5:] - mean) / (var + net.always.eps).sqrt())
    found = statistics(net)
    torch.testing.assert_close(found["rarely.running_mean"], y.mean(0))
    torch.testing.assert_close(found["rarely.running_var"], y.var(0))


def test_layers_of_every_kind_equal_one_batch_in_half_precision_roughly() -> None:
    net = ResNet().float()
    with torch.autocast("cpu", torch.bfloat16):
        wanted = of_big_batch(net, X.float())
        recalibrated(net, [part.float() for part in ragged(X)])
    for name, tensor in statistics(net).items():
        assert tensor.dtype == torch.float32
        torch.testing.assert_close(tensor, wanted[name], rtol=0.1, atol=0.05)


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own, while compiling
def test_compiled_net_equals_one_batch() -> None:
    net = ResNet()
    wanted = of_big_batch(net, X)
    compiled: Any = torch.compile(net, backend="eager")
    compiled(X)
    recalibrate(every_layer(net), lambda: ragged(X), compiled)
    assert furthest(statistics(net), wanted) <= EXACT


def test_synchronised_layers_equal_one_batch() -> None:
    """They are asked in evaluation mode, where they need no accelerator."""
    net = ResNet()
    wanted = of_big_batch(net, X)
    synced = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    recalibrated(synced, ragged(X))
    assert furthest(statistics(synced), wanted) <= EXACT


def test_single_value_leaves_finite_statistics() -> None:
    net = nn.Sequential(nn.BatchNorm1d(3))
    recalibrated(net, [torch.ones(1, 3)])
    assert statistics(net)["0.running_var"].tolist() == [0, 0, 0]


def test_no_data_at_all_leaves_statistics_as_they_were() -> None:
    net = ResNet()
    net(X)
    before = statistics(net)
    recalibrate(every_layer(net), list, net)
    assert furthest(statistics(net), before) == 0


# ---- merging -------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(9, 4), (9, 4, 5), (9, 4, 2, 3), (9, 4, 2, 1, 3)])
def test_joined_statistics_equal_those_of_the_whole(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64) * 3 + 100
    parts = [statistics_of(part) for part in x.split([2, 1, 0, 6])]
    count, mean, squares = joined(torch.stack(parts)).split([1, 4, 4])
    over = [0, *range(2, x.ndim)]
    assert count == x.numel() / 4
    torch.testing.assert_close(mean, x.mean(over))
    torch.testing.assert_close(squares / count, x.var(over, False))
    assert not joined(torch.stack(parts[2:3] * 2)).any()


# ---- several ranks -------------------------------------------------------------------


def shares(x: Tensor, rank: int, world: int, how: str) -> list[Tensor]:
    """This rank's micro-batches of all rows."""
    if how == "one rank has none":
        rows = x if rank == 0 else x[:0]
    else:
        rows = x[rank::world]
    return list(rows.split(3 + rank)) if len(rows) else []


def on_rank(rank: int, world: int, how: str, exact: bool) -> dict[str, Tensor]:
    net, x = ResNet(), images()
    layers = every_layer(net)
    ranks = find_ranks(aggregation="mean")
    parts = shares(x, rank, world, how)
    recalibrate(layers, lambda: parts, net, ranks=ranks, exact=exact)
    return statistics(net)


@pytest.mark.parametrize(
    ("world", "how"), [(2, "rows dealt out"), (3, "rows dealt out")]
)
def test_ranks_equal_all_rows_as_one_batch(
    world: int, how: str, on_ranks: OnRanks
) -> None:
    """23 rows divide by neither."""
    wanted = of_big_batch(ResNet(), images())
    found = on_ranks(on_rank, world, how, True)
    assert all(furthest(each, wanted) <= EXACT for each in found)
    for each in found[1:]:
        assert furthest(each, found[0]) == 0


def test_rank_without_rows_gets_the_statistics_of_all(on_ranks: OnRanks) -> None:
    wanted = of_big_batch(ResNet(), images())
    found = on_ranks(on_rank, 2, "one rank has none", True)
    assert all(furthest(each, wanted) <= EXACT for each in found)


def test_one_pass_on_ranks_equals_in_the_first_layer_only(on_ranks: OnRanks) -> None:
    wanted = of_big_batch(ResNet(), images())
    for each in on_ranks(on_rank, 2, "rows dealt out", False):
        off = distance(each, wanted)
        assert off["stem_bn.running_var"] <= EXACT
        assert off["head_bn.running_var"] > NAIVE / 10


def test_ranks_apart_do_not_equal_all_rows() -> None:
    """The negative control: one rank's share alone."""
    net = ResNet()
    wanted = of_big_batch(net, X)
    recalibrated(net, shares(X, 0, 2, "rows dealt out"))
    assert furthest(statistics(net), wanted) > NAIVE
