"""Statistics computed pass by pass equal those of all data as one batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.core.conftest import OnRanks
from tests.zoo.small_resnet import (
    ROWS,
    ResNet,
    distance,
    furthest,
    images,
    of_big_batch,
    ragged,
    statistics,
)
from trainkit.core.batch_norm.layers import every_layer, freeze
from trainkit.core.batch_norm.recalibration import recalibrate
from trainkit.core.batch_norm.statistics import joined, statistics_of
from trainkit.core.ranks import find_ranks

EXACT = 1e-10
NAIVE = 1e-2
X = images()
FIVE = X.flatten(1)[:, :5]
PARTS = [4, 2, 7, 2, 8]


def recalibrated(net: nn.Module, parts: list[Any], **options: Any) -> nn.Module:
    recalibrate(every_layer(net), lambda: parts, net, **options)
    return net


# ---- nets ----------------------------------------------------------------------------


class Backwards(nn.Module):
    """Defines last what it calls first."""

    def __init__(self) -> None:
        super().__init__()
        self.third = nn.BatchNorm1d(5)
        self.second = nn.BatchNorm1d(5)
        self.first = nn.BatchNorm1d(5)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for seed, layer in enumerate((self.first, self.second, self.third)):
            generator = torch.Generator().manual_seed(seed)
            weight = torch.randn(5, 5, generator=generator, dtype=torch.float64)
            x = torch.tanh(layer(x @ weight))
        return x


class Domains(nn.Module):
    """A BatchNorm for each domain, before those that all share: a micro-batch is of one
    domain, and leaves the others' layers out."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.BatchNorm1d(5), nn.Tanh(), nn.BatchNorm1d(5))
        self.domains = nn.ModuleList(nn.BatchNorm1d(5) for _ in range(3))
        self.double()

    def forward(self, batch: list[tuple[int, Tensor]]) -> Tensor:
        parts = [torch.tanh(self.domains[number](x)) for number, x in batch]
        return self.trunk(torch.cat(parts))


class Odd(nn.Module):
    """Calls a layer by keyword, catches what is raised, and leaves one layer out."""

    unused: Any

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.BatchNorm1d(5), nn.BatchNorm1d(5)
        self.unused = nn.BatchNorm1d(5)
        self.double()
        self.unused.running_mean.fill_(7)

    def forward(self, x: Tensor) -> Tensor:
        try:
            x = self.first(input=x)
        except Exception as error:
            raise AssertionError("nothing for the user to catch") from error
        return self.second(torch.sin(x))


class Siamese(nn.Module):
    """One layer at two places of the same depth, and one after them, which few rows
    leave out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Linear(5, 4), nn.Linear(5, 4)
        self.shared, self.after = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.shared(self.left(x))) * self.shared(self.right(x))
        return self.after(y) if len(x) > 3 else y


def used(*, training: bool = True) -> ResNet:
    net = ResNet().train(training)
    net(X[:3])  # statistics of another time
    return net


DOMAINS = list(enumerate(ragged(FIVE, (9, 7, 7))))
CASES: dict[str, tuple[Callable[[], nn.Module], Any, list[Any]]] = {
    # a net, all rows, and its micro-batches
    "one": (used, X, [X]),
    "ragged": (used, X, ragged(X)),
    "ones": (used, X, ragged(X, [1] * ROWS)),
    "last of one": (used, X, ragged(X, [11, 11, 1])),
    "evaluating": (lambda: used(training=False), X, ragged(X)),
    "backwards": (Backwards, FIVE, ragged(FIVE)),
    "empty parts": (Backwards, FIVE, [FIVE[:0], *ragged(FIVE), FIVE[:0]]),
    "by keyword, one unused": (Odd, FIVE, ragged(FIVE)),
    "domains": (Domains, DOMAINS, [[DOMAINS[i]] for i in (2, 0, 1)]),
}


@pytest.mark.parametrize("name", CASES)
def test_every_layer_equals_all_rows_as_one_batch(name: str) -> None:
    make, whole, parts = CASES[name]
    net = make()
    wanted = of_big_batch(net, whole)
    recalibrated(net, parts)
    assert furthest(statistics(net), wanted) <= EXACT


def test_synchronised_layers_equal_one_batch() -> None:
    """They are asked in evaluation mode, where they need no accelerator."""
    net = nn.SyncBatchNorm.convert_sync_batchnorm(ResNet())
    wanted = of_big_batch(ResNet(), X)
    assert furthest(statistics(recalibrated(net, ragged(X))), wanted) <= EXACT


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own, while compiling
def test_compiled_net_equals_one_batch() -> None:
    net = ResNet()
    wanted = of_big_batch(net, X)
    compiled: Any = torch.compile(net, backend="eager")
    compiled(X)
    recalibrate(every_layer(net), lambda: ragged(X), compiled)
    assert furthest(statistics(net), wanted) <= EXACT


def test_layer_shared_at_one_depth_equals_both_its_inputs_together() -> None:
    """The one after it has the rows of the batches that call it."""
    net = Siamese()
    with torch.no_grad():
        one, two = net.left(FIVE), net.right(FIVE)
    both = torch.cat([one, two])
    recalibrated(net, ragged(FIVE, [2, 3, 10, 8]))
    var, mean = torch.var_mean(both, 0, correction=0)
    left, right = ((x[5:] - mean) / (var + net.shared.eps).sqrt() for x in (one, two))
    for layer, x in ((net.shared, both), (net.after, torch.tanh(left) * right)):
        torch.testing.assert_close(layer.running_mean, x.mean(0))
        torch.testing.assert_close(layer.running_var, x.var(0))


def test_running_statistics_do_not_equal_those_of_all_rows() -> None:
    """The negative control: what BatchNorm has without being recalibrated."""
    net = ResNet()
    wanted = of_big_batch(net, X)
    for _ in range(50):
        for part in ragged(X, PARTS):
            net(part)
    assert min(distance(statistics(net), wanted).values()) > NAIVE / 10
    assert furthest(statistics(net), wanted) > NAIVE


def test_one_pass_equals_in_the_first_layer_and_in_no_deeper_one() -> None:
    """Seven of the nine layers follow each other; the last pass changes nothing."""
    net, other = ResNet(), ResNet()
    wanted = of_big_batch(net, X)
    parts = ragged(X, PARTS)
    assert recalibrate(every_layer(net), lambda: parts, net, exact=False) == 1
    assert recalibrate(every_layer(other), lambda: parts, other) == 8
    off = distance(statistics(net), wanted)
    assert off.pop("stem_bn.running_mean") <= EXACT
    assert off.pop("stem_bn.running_var") <= EXACT
    for name in ("layers.0.bn1", "layers.0.downsample.1", "layers.1.bn2", "head_bn"):
        assert off[f"{name}.running_var"] > NAIVE / 10


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
    with_gradients = [n for n, p in net.named_parameters() if p.grad is not None]
    assert with_gradients == ["head.weight"]
    assert not any(m._forward_pre_hooks for m in net.modules())


def test_layers_left_out_stay_and_are_used_as_they_are() -> None:
    """A frozen layer normalises by its own statistics, before and after."""
    net, name = ResNet(), "layers.0.bn1"
    net(X)
    freeze(every_layer(net)[name])
    before = statistics(net)
    layers = {n: x for n, x in every_layer(net).items() if n != name}
    wanted = of_big_batch(net, X)  # a copy of the frozen layer is frozen as well
    recalibrate(layers, lambda: ragged(X), net)
    assert furthest(statistics(net), wanted) <= EXACT
    kept = f"{name}.running_mean"
    assert torch.equal(statistics(net)[kept], before[kept])


def test_little_data_and_none() -> None:
    net = nn.Sequential(nn.BatchNorm1d(3))
    recalibrated(net, [torch.ones(1, 3)])
    assert statistics(net)["0.running_var"].tolist() == [0, 0, 0]
    before = statistics(net)
    recalibrated(net, [])
    assert furthest(statistics(net), before) == 0


def test_far_from_zero_in_single_precision_equals_double_precision() -> None:
    """A sum of squares less a squared sum would lose all digits here."""
    x = (torch.randn(64, 5) + 1e4).float()
    layer = nn.BatchNorm1d(5)
    recalibrated(nn.Sequential(layer), list(x.split(3)))
    var = x.double().var(0).float()
    torch.testing.assert_close(layer.running_var, var, rtol=1e-3, atol=0)


class Elsewhere(Tensor):
    """It is on a device for which torch has no kernel of these statistics."""

    device = torch.device("meta")


@pytest.mark.parametrize("kind", [Tensor, Elsewhere])
@pytest.mark.parametrize("shape", [(9, 4), (9, 4, 2, 1, 3)])
def test_joined_statistics_equal_those_of_the_whole(shape: Any, kind: Any) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64) * 3 + 100
    split = [part.as_subclass(kind) for part in x.split([2, 1, 0, 6])]
    parts = [statistics_of(part).as_subclass(Tensor) for part in split]
    count, mean, squares = joined(torch.stack(parts)).split([1, 4, 4])
    over = [0, *range(2, x.ndim)]
    assert count == x.numel() / 4
    torch.testing.assert_close(mean, x.mean(over))
    torch.testing.assert_close(squares / count, x.var(over, False))
    assert not joined(torch.stack(parts[2:3] * 2)).any()


# ---- several ranks -------------------------------------------------------------------


def share(rank: int, world: int, how: str) -> list[Tensor]:
    """This rank's micro-batches of all rows."""
    rows = X[rank::world] if how == "dealt out" else X[: len(X) * (rank == 0)]
    return list(rows.split(3 + rank)) if len(rows) else []


def on_rank(rank: int, world: int, how: str, exact: bool) -> dict[str, Tensor]:
    ranks = find_ranks(aggregation="mean")
    parts = share(rank, world, how)
    return statistics(recalibrated(ResNet(), parts, ranks=ranks, exact=exact))


@pytest.mark.parametrize(("world", "how"), [(3, "dealt out"), (2, "one rank has none")])
def test_ranks_equal_all_rows_as_one_batch_and_a_rank_alone_does_not(
    world: int, how: str, on_ranks: OnRanks
) -> None:
    """23 rows do not divide by three."""
    wanted = of_big_batch(ResNet(), X)
    found = on_ranks(on_rank, world, how, True)
    assert all(furthest(each, wanted) <= EXACT for each in found)
    assert all(furthest(each, found[0]) == 0 for each in found[1:])
    alone = recalibrated(ResNet(), share(0, 2, "dealt out"))
    assert furthest(statistics(alone), wanted) > NAIVE
    for each in on_ranks(on_rank, world, how, False):
        off = distance(each, wanted)
        assert off["stem_bn.running_var"] <= EXACT
        assert off["head_bn.running_var"] > NAIVE / 10
