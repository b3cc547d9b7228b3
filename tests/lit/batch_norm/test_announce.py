"""BatchNorm that does harm is named before training, with a guard and without one, and
nothing else is."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning, GradientAccumulationScheduler
from torch import nn
from torch.utils.data import DataLoader

from tests.helpers import NAIVE, TOLERANCE, deviation, run_ranks, weights
from tests.lit.batch_norm.fits import (
    BATCH,
    At,
    ByHand,
    ConvModule,
    ConvNet,
    MixedConv,
    batches,
    dataset,
    fit,
)
from tests.zoo.callbacks import told
from tests.zoo.modules import Stream
from trainkit import (
    AccumulationCallback,
    AccumulationSchedule,
    BatchNormGuard,
    MicroBatching,
    PerSample,
)
from trainkit.core.batch_norm.layers import freeze, normalising_by_batch
from trainkit.errors import TrainkitError

pytestmark = [
    pytest.mark.filterwarnings("ignore:accumulation. an open window"),
    pytest.mark.filterwarnings("ignore:accumulate_grad_batches=.*has only"),
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
    with told("BatchNorm: ") as found:
        fit(policy, **{"max_epochs": 1, **how})
    return found


def own_batches(sizes: Any) -> Any:
    """From a loader that does not say how large they are."""
    indices = iter(range(27))
    cut = [[next(indices) for _ in range(size)] for size in sizes]
    return DataLoader(dataset(), batch_sampler=cut)


def with_layers(make: Any) -> ConvModule:
    def build() -> nn.Module:
        net: Any = ConvNet()
        net.bn1, net.bn2, net.bn3 = make(4), make(8), nn.Identity()
        return net.double()

    return ConvModule(build)


def partly() -> ConvModule:
    module = ConvModule()
    module.net.bn2.eval()
    return module


SPLIT = AccumulationCallback(PerSample(), micro_batching=MicroBatching(size=2))
UNTRACKED = lambda c: nn.BatchNorm2d(c, track_running_stats=False)  # noqa: E731
EVALUATING = lambda c: nn.BatchNorm2d(c).eval()  # noqa: E731
THEN_ONE = {"more": [AccumulationSchedule({0: 3, 1: 1})]}
CUT = {"data": own_batches([4, 4, 8, 8]), "more": [SPLIT]}
TOLD: list[tuple[int, str | None, dict[str, Any]]] = [
    # How many micro-batches a window has, what is said, and how it is trained.
    (3, FEW, {"max_epochs": 3, "exact": True}),
    (3, FEW, {}),  # without the callback
    (1, FEW, {**THEN_ONE, "exact": True}),
    (3, "of 4 samples", {"data": DataLoader(Stream(dataset()), batch_size=4)}),
    (3, "of 5 samples", {"data": own_batches([5, 4, 4, 7, 7])}),
    (1, "of 2 samples.*has 2 micro", CUT),
    (3, "net.bn1, net.bn3 normalise", {"module": partly}),
    (2, "a window has 2 micro-batches", {"module": ByHand}),
    (3, None, {"policy": "momentum"}),
    (1, None, {}),
    (2, None, {"data": batches(batch_size=16)}),
    (3, None, {"data": own_batches([20, 4, 3])}),
    (3, None, {"guard": {"min_samples": 4}}),
    (3, None, {"module": lambda: with_layers(UNTRACKED)}),
    (3, None, {"module": lambda: with_layers(EVALUATING)}),
]


def options(how: dict[str, Any]) -> dict[str, Any]:
    return {**how, "module": how["module"]()} if "module" in how else dict(how)


@pytest.mark.parametrize(("accumulate", "match", "how"), TOLD)
def test_small_micro_batches_of_a_window_are_told_once_and_nothing_else(
    accumulate: int, match: str | None, how: dict[str, Any]
) -> None:
    """PL#17446, runai#14, GradientAccumulator#6: nobody says it at run time."""
    how = {"accumulate": accumulate, **how}
    policy: Any = how.pop("policy", "error" if match is None else "warn")
    texts = said(BatchNormGuard(policy, **how.pop("guard", {})), **options(how))
    assert len(texts) == (match is not None)
    if match is not None:
        assert re.search(match, texts[0])
        assert all(remedy in texts[0] for remedy in REMEDIES)
        with pytest.raises(TrainkitError, match=match):
            fit("error", **options(how))


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


@pytest.mark.parametrize(("ranks", "samples"), [(2, "4, 8 samples"), (4, "4 samples")])
def test_synchronised_layers_count_all_their_ranks(
    ranks: int, samples: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr(
        "trainkit.lit.batch_norm.announce.num_sharing_ranks",
        lambda layer: ranks if layer is first else 1,
    )
    module = ConvModule()
    first = module.net.bn1
    (text,) = said(module=module)
    assert ("net.bn1" in text) is (ranks == 2)
    assert "net.bn2, net.bn3 normalise" in text
    assert f"of {samples}" in text


def warned_on(rank: int, world: int) -> list[str]:
    ddp: Any = {"strategy": "ddp", "devices": world, "accumulate": 2}
    return said(module=MixedConv(), **ddp)


def test_first_rank_alone_tells_it() -> None:
    (text,), silent = run_ranks(warned_on, 2)
    assert f"of {BATCH} samples" in text
    assert silent == []


def test_table_says_that_it_was_told(capsys: Any) -> None:
    said()
    assert "BatchNorm: 3 layers on 4 samples (warned)" in capsys.readouterr().out


# ---- without a guard: which layers ---------------------------------------------------


def rows(capsys: Any) -> list[str]:
    """What the table says of BatchNorm."""
    lines = capsys.readouterr().out.splitlines()
    found = [line.removeprefix("trainkit | ") for line in lines]
    assert any(line.startswith("step: ") for line in found)
    return [line for line in found if line.startswith("BatchNorm: ")]


def one_layer(layer: nn.Module) -> ConvModule:
    """A module with it, in a state of its own."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        parts = nn.Linear(36, 5), layer, nn.Tanh(), nn.Linear(5, 3)
        return ConvModule(lambda: nn.Sequential(nn.Flatten(), *parts).double())


class Frozen(BaseFinetuning):
    """By Lightning's own means, which leave the layer in training mode."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net[2], train_bn=False)

    def finetune_function(self, *args: Any, **kwargs: Any) -> None: ...


def kept() -> nn.Module:
    freeze(layer := nn.BatchNorm1d(5))
    return layer


def untracked() -> nn.Module:
    return nn.BatchNorm1d(5, track_running_stats=False)


# Before the first batch of each epoch, as nets with pretrained encoders do.
LATER = At("on_train_epoch_start", lambda trainer, module: module.net.eval())
STATES: dict[str, tuple[Any, list[Any], bool]] = {
    "training": (lambda: nn.BatchNorm1d(5), [], True),
    "without statistics": (untracked, [], True),
    "without statistics, evaluating": (lambda: untracked().eval(), [], True),
    "frozen by finetuning": (lambda: nn.BatchNorm1d(5), [Frozen()], True),
    "synchronised": (lambda: nn.SyncBatchNorm(5), [], True),
    "evaluating": (lambda: nn.BatchNorm1d(5).eval(), [], False),
    "evaluating later": (lambda: nn.BatchNorm1d(5), [LATER], False),
    "frozen": (kept, [], False),
    "group": (lambda: nn.GroupNorm(1, 5), [], False),
    "none": (nn.Identity, [], False),
}
LINE = (
    "BatchNorm: 1 layer in training mode (net.2) normalises by the statistics of each "
    "micro-batch, so the step is not the big batch's; BatchNormGuard has remedies"
)


@pytest.mark.parametrize("state", STATES)
def test_layer_is_named_where_the_step_is_another_one(state: str, capsys: Any) -> None:
    """Two windows of three micro-batches of four."""
    make, others, harms = STATES[state]
    how: dict[str, Any] = {"max_epochs": 1, "exact": True}
    cut = fit(None, *others, module=one_layer(make()), data=batches(24), **how)
    assert rows(capsys) == [LINE] * harms
    one = {"data": batches(24, 12), "accumulate": 1}
    big = fit(None, *others, module=one_layer(make()), **one, **how)
    assert rows(capsys) == []
    off = deviation(cut, big, weights(one_layer(make())))
    assert (off > NAIVE) if harms else (off < TOLERANCE[torch.float64])


def test_several_layers_are_named_and_lazy_ones(capsys: Any) -> None:
    module = ConvModule()
    module.net.bn3 = nn.LazyBatchNorm1d(dtype=torch.double)
    assert normalising_by_batch(module) == ["net.bn1", "net.bn2", "net.bn3"]
    # Lightning wants lazy layers to have seen a batch.
    module.net(next(iter(batches()))[0])
    fit(module=module, exact=True)
    (row,) = rows(capsys)
    assert "3 layers in training mode (net.bn1, net.bn2 and 1 more) norm" in row


# ---- without a guard: which windows --------------------------------------------------


BY_MIXIN = {"module": MixedConv, "exact": False}
THEN_TWO = {"more": [AccumulationSchedule({0: 1, 1: 2})]}
LIGHTNINGS = {"more": [GradientAccumulationScheduler({1: 2})]}


@pytest.mark.parametrize(
    ("several", "accumulate", "how"),
    [
        (True, 3, {}),
        (True, 3, BY_MIXIN),
        (True, 1, {"more": [SPLIT], "exact": False}),
        (True, 3, {"module": ByHand, "exact": False}),
        (True, 1, THEN_TWO),
        (True, 1, LIGHTNINGS),
        (False, 1, BY_MIXIN),
        (False, 3, {"data": batches(4)}),
        (False, 3, {"limit_train_batches": 1}),
        (False, 1, {"more": [AccumulationSchedule({0: 1})]}),
        (False, 1, {**THEN_TWO, "data": batches(4)}),
    ],
)
def test_windows_of_several_micro_batches_are_spoken_of(
    capsys: Any, several: bool, accumulate: int, how: dict[str, Any]
) -> None:
    how = {"data": batches(24), "exact": True, "accumulate": accumulate, **how}
    fit(None, **options(how))
    assert bool(rows(capsys)) == several


@pytest.mark.parametrize("accumulate", [1, 3])
def test_guard_of_ones_own_speaks_for_itself(capsys: Any, accumulate: int) -> None:
    class Mine(BatchNormGuard): ...

    fit(Mine("ignore"), accumulate=accumulate, exact=True)
    assert rows(capsys) == []


@pytest.mark.parametrize("policy", [None, "group_norm"])
def test_nothing_is_called_exact_unmeasured(capsys: Any, policy: str | None) -> None:
    ours = AccumulationCallback(PerSample(), proof="off")
    fit(policy, ours, data=batches(24), accumulate=4)
    said = capsys.readouterr().out
    assert "(2 of 4 micro-batches)" in said
    assert "exact" not in said
