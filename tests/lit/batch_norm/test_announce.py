"""Said once, by name, where it matters, and nowhere else."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from tests.helpers import run_ranks, trainer
from tests.lit.batch_norm.fits import (
    BATCH,
    At,
    ConvModule,
    ConvNet,
    batches,
    dataset,
    fit,
)
from trainkit import (
    AccumulationMixin,
    AccumulationSchedule,
    BatchNormGuard,
    PerSample,
)
from trainkit.core.batch_norm.layers import every_layer
from trainkit.errors import TrainkitError

pytestmark = [
    pytest.mark.filterwarnings("ignore:accumulation. an open window"),
    pytest.mark.filterwarnings("ignore:Found .* module"),
]

FEW = (
    r"BatchNorm: net\.bn1, net\.bn2, net\.bn3 normalise by the statistics of 4 "
    r"samples, those of one micro-batch, and a window has 3 micro-batches "
    r"\(min_samples=16\)"
)
REMEDIES = (
    "'momentum'", "'recalibrate'", "'freeze'", "sync_batchnorm=True", "'group_norm'",
)  # fmt: skip


def said(policy: Any = "warn", **how: Any) -> list[str]:
    """What is warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(policy, max_epochs=how.pop("max_epochs", 1), **how)
    return [str(w.message) for w in caught if "BatchNorm: " in str(w.message)]


@pytest.mark.parametrize("exact", [True, False])
def test_small_micro_batches_of_a_window_are_told_once(exact: bool) -> None:
    """PL#17446, runai#14, GradientAccumulator#6: nobody says it at run time."""
    (text,) = said(exact=exact, max_epochs=3)
    assert re.match(FEW, text)
    for remedy in REMEDIES:
        assert remedy in text


def test_nothing_is_said_without_the_guard() -> None:
    """The negative control."""
    assert said(None) == []


def test_it_is_told_before_the_first_step_and_in_each_fit() -> None:
    class Fails(ConvModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise KeyError("too late")

    guard = BatchNormGuard()
    for _ in range(2):
        with (
            pytest.warns(UserWarning, match=FEW),
            pytest.raises(KeyError, match="too late"),
        ):
            fit(guard, module=Fails())


def test_error_refuses_what_warn_tells() -> None:
    with pytest.raises(TrainkitError, match=FEW):
        fit("error")


@pytest.mark.parametrize("policy", ["warn", "error"])
@pytest.mark.parametrize(
    "how",
    [
        {"accumulate": 1},
        {"data": batches(batch_size=16), "accumulate": 2},
        {"policy": {"min_samples": 4}},
        {"policy": {"min_samples": 1}},
    ],
)
def test_large_micro_batches_and_single_ones_are_not(policy: Any, how: Any) -> None:
    guard = BatchNormGuard(policy, **how.get("policy", {}))
    assert said(guard, **{k: v for k, v in how.items() if k != "policy"}) == []


def with_layers(make: Any) -> ConvModule:
    def build() -> nn.Module:
        net: Any = ConvNet()
        net.bn1, net.bn2 = make(4), make(8)
        net.bn3 = nn.Identity()
        return net.double()

    return ConvModule(build)


def in_evaluation(channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels).eval()


@pytest.mark.parametrize(
    "make",
    [
        lambda c: nn.Identity(),
        lambda c: nn.GroupNorm(2, c),
        lambda c: nn.InstanceNorm2d(c, track_running_stats=True),
        lambda c: nn.BatchNorm2d(c, track_running_stats=False),
        in_evaluation,
    ],
)
def test_layers_without_a_batch_of_their_own_are_not(make: Any) -> None:
    assert said("error", module=with_layers(make)) == []


def test_only_layers_that_train_are_named() -> None:
    module = ConvModule()
    module.net.bn2.eval()
    (text,) = said(module=module)
    assert "net.bn1, net.bn3 normalise" in text


@pytest.mark.parametrize("policy", ["ignore", "momentum", "recalibrate"])
def test_other_policies_do_not_complain(policy: Any) -> None:
    assert said(policy) == []


# ---- how many samples ----------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "told"), [(1, True), (2, True), (4, False)])
def test_synchronised_layers_count_all_their_ranks(
    ranks: int, told: bool, monkeypatch: Any
) -> None:
    monkeypatch.setattr(
        "trainkit.lit.batch_norm.announce.num_sharing_ranks",
        lambda layer: ranks if layer is first else 1,
    )
    module = ConvModule()
    first = module.net.bn1
    (text,) = said(module=module)
    assert ("net.bn1" in text) is told
    assert "net.bn2, net.bn3 normalise" in text
    samples = {1: "of 4 samples", 2: "of 4, 8 samples", 4: "of 4 samples"}
    assert samples[ranks] in text


def own_batches(sizes: Any) -> Any:
    indices = iter(range(27))
    cut = [[next(indices) for _ in range(size)] for size in sizes]
    return DataLoader(dataset(), batch_sampler=cut)


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(dataset())


@pytest.mark.parametrize("exact", [True, False])
def test_unknown_batch_is_judged_by_the_first_that_a_layer_sees(exact: bool) -> None:
    (text,) = said(data=own_batches([5, 4, 4, 7, 7]), exact=exact)
    assert "of 5 samples" in text
    assert said(data=own_batches([20, 4, 3]), exact=exact) == []
    match = "of 5 samples"
    with pytest.raises(TrainkitError, match=match):
        fit("error", data=own_batches([5, 4, 4, 7, 7]), exact=exact)


def test_stream_says_its_batch() -> None:
    (text,) = said(data=DataLoader(Stream(), batch_size=4))
    assert "of 4 samples" in text


class Cuts(ConvModule):
    """Runs its net on parts of the loader's batch, as split windows do."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        parts = zip(batch[0].split(4), batch[1].split(4), strict=True)
        return torch.stack([F.cross_entropy(self.net(x), y) for x, y in parts]).mean()


@pytest.mark.parametrize(("accumulate", "micro_batches"), [(1, 5), (2, 10)])
def test_effective_batch_made_by_cutting_is_told(
    accumulate: int, micro_batches: int
) -> None:
    loader = batches(rows=40, batch_size=20)
    (text,) = said(module=Cuts(), data=loader, accumulate=accumulate)
    assert "of 4 samples" in text
    assert f"a window has {micro_batches} micro-batches" in text
    with pytest.raises(TrainkitError, match="of 4 samples"):
        fit("error", module=Cuts(), data=loader, accumulate=accumulate)
    assert said(module=ConvModule(), data=loader, accumulate=accumulate) == []


def test_schedule_that_accumulates_later_is_judged_by_its_first_window() -> None:
    schedule = AccumulationSchedule({0: 3, 1: 1})
    with pytest.warns(UserWarning, match=FEW):
        fit("warn", schedule, accumulate=1)


class Keywords(ConvModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        net = self.net
        x = net.bn1(input=net.conv1(batch[0]))
        x = net.bn2(input=net.conv2(x))
        x = net.bn3(net.flat(x.flatten(1)))
        return F.cross_entropy(net.head(x), batch[1])


def test_layers_called_by_keyword_are_looked_at_as_well() -> None:
    (text,) = said(module=Keywords(), data=own_batches([5, 4, 4, 7, 7]))
    assert "of 5 samples" in text


def test_layers_are_looked_at_only_until_the_first_batch_is_over() -> None:
    seen: list[int] = []

    def count(trainer: Any, module: Any) -> None:
        layers = every_layer(module).values()
        seen.append(sum(len(layer._forward_pre_hooks) for layer in layers))

    fit("warn", At("on_train_batch_start", count), data=batches(48, 16))
    assert seen[0] == 3
    assert set(seen[1:]) == {0}


def test_nothing_stays_on_the_layers_after_an_exception() -> None:
    class Fails(ConvModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise KeyError("a user's mistake")

    module = Fails()
    with pytest.raises(KeyError, match="a user's mistake"):
        fit("warn", accumulate=1, module=module)
    assert not any(x._forward_pre_hooks for x in every_layer(module).values())


# ---- ranks ---------------------------------------------------------------------------


class Mixed(AccumulationMixin, ConvModule):
    accumulation = PerSample()


def warned_on(rank: int, world: int) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(
            2, strategy="ddp", devices=world, max_epochs=1, callbacks=[BatchNormGuard()]
        ).fit(Mixed(), batches())
    return [str(w.message) for w in caught if "BatchNorm: " in str(w.message)]


def test_first_rank_alone_tells_it() -> None:
    told, silent = run_ranks(warned_on, 2)
    assert len(told) == 1
    assert f"of {BATCH} samples" in told[0]
    assert silent == []


def test_table_says_that_it_was_told(capsys: Any) -> None:
    said()
    assert "BatchNorm: 3 layers on 4 samples (warned)" in capsys.readouterr().out
    said("warn", accumulate=1)
    assert "trainkit | BatchNorm" not in capsys.readouterr().out
