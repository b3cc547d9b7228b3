"""BatchNorm without a guard is named before training, exactly where it does harm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning, GradientAccumulationScheduler
from torch import nn

from tests.helpers import NAIVE, TOLERANCE, deviation, trainer, weights
from tests.lit.batch_norm.fits import At, ConvModule, MixedConv, StepsByTwo, batches
from trainkit import (
    AccumulationCallback,
    AccumulationMixin,
    AccumulationSchedule,
    BatchNormGuard,
    MicroBatching,
    PerSample,
)
from trainkit.core.batch_norm.layers import freeze, normalising_by_batch

pytestmark = [
    pytest.mark.filterwarnings("ignore:Found .* in eval mode at the start"),
    pytest.mark.filterwarnings("ignore:accumulate_grad_batches=.*has only"),
]

ROWS = 24
"""Two windows of three micro-batches of four."""


def fit(
    *callbacks: Any,
    module: Any = None,
    accumulate: int = 3,
    exact: Any = None,
    **how: Any,
) -> Any:
    module = module or ConvModule()
    ours = exact or AccumulationCallback(PerSample())
    ours = [] if isinstance(module, AccumulationMixin) else [ours]
    data = batches(rows=how.pop("rows", ROWS), batch_size=how.pop("batch_size", 4))
    trainer(accumulate, callbacks=[*ours, *callbacks], **how).fit(module, data)
    return module


def rows(capsys: Any) -> list[str]:
    found = [
        line.removeprefix("trainkit | ")
        for line in capsys.readouterr().out.splitlines()
    ]
    assert any(line.startswith("step: ") for line in found)
    return [line for line in found if line.startswith("BatchNorm: ")]


# ---- which layers --------------------------------------------------------------------


class One(ConvModule):
    """One layer, in a state of its own."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.net: Any = nn.Sequential(
                nn.Flatten(), nn.Linear(36, 5), layer, nn.Tanh(), nn.Linear(5, 3)
            ).double()


class Frozen(BaseFinetuning):
    """By Lightning's own means, which leave the layer in training mode."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net[2], train_bn=False)

    def finetune_function(self, *args: Any, **kwargs: Any) -> None: ...


def evaluating(layer: nn.Module) -> nn.Module:
    return layer.eval()


def kept() -> nn.Module:
    layer = nn.BatchNorm1d(5)
    freeze(layer)
    return layer


STATES: dict[str, tuple[Callable[[], nn.Module], list[Any], bool]] = {
    "training": (lambda: nn.BatchNorm1d(5), [], True),
    "without statistics": (
        lambda: nn.BatchNorm1d(5, track_running_stats=False),
        [],
        True,
    ),
    "without statistics, evaluating": (
        lambda: evaluating(nn.BatchNorm1d(5, track_running_stats=False)),
        [],
        True,
    ),
    "frozen by finetuning": (lambda: nn.BatchNorm1d(5), [Frozen()], True),
    "synchronised": (lambda: nn.SyncBatchNorm(5), [], True),
    "evaluating": (lambda: evaluating(nn.BatchNorm1d(5)), [], False),
    # Before the first batch of each epoch, as nets with pretrained encoders do.
    "evaluating later": (
        lambda: nn.BatchNorm1d(5),
        [At("on_train_epoch_start", lambda trainer, module: module.net.eval())],
        False,
    ),
    "frozen": (kept, [], False),
    "group": (lambda: nn.GroupNorm(1, 5), [], False),
    "none": (nn.Identity, [], False),
}


@pytest.mark.parametrize("state", STATES)
def test_layer_is_named_where_the_step_is_not_the_big_batchs(
    state: str, capsys: Any
) -> None:
    make, others, harms = STATES[state]
    start = weights(One(make()))
    cut = fit(*others, module=One(make()), max_epochs=1)
    said = rows(capsys)
    big = fit(*others, module=One(make()), accumulate=1, batch_size=12, max_epochs=1)
    assert rows(capsys) == []
    off = deviation(cut, big, start)
    assert (off > NAIVE) if harms else (off < TOLERANCE[torch.float64])
    assert said == (
        [
            "BatchNorm: 1 layer in training mode (net.2) normalises by the statistics "
            "of each micro-batch, so the step is not the big batch's; BatchNormGuard "
            "has remedies"
        ]
        if harms
        else []
    )


def test_several_layers_are_named_and_lazy_ones(capsys: Any) -> None:
    module = ConvModule()
    module.net.bn3 = nn.LazyBatchNorm1d(dtype=torch.double)
    assert normalising_by_batch(module) == ["net.bn1", "net.bn2", "net.bn3"]
    # Lightning wants lazy layers to have seen a batch.
    module.net(next(iter(batches()))[0])
    fit(module=module)
    said = "3 layers in training mode (net.bn1, net.bn2 and 1 more) norm"
    assert said in rows(capsys)[0]


# ---- which windows -------------------------------------------------------------------


SPLIT = AccumulationCallback(PerSample(), micro_batching=MicroBatching(size=2))


@pytest.mark.parametrize(
    ("several", "how"),
    [
        (True, {}),
        (True, {"module": MixedConv}),
        (True, {"accumulate": 1, "exact": SPLIT}),
        (True, {"accumulate": 1, "module": StepsByTwo}),
        (True, {"accumulate": 1, "of": AccumulationSchedule({0: 1, 1: 2})}),
        (True, {"accumulate": 1, "of": GradientAccumulationScheduler({1: 2})}),
        (False, {"accumulate": 1, "module": MixedConv}),
        (False, {"rows": 4}),
        (False, {"limit_train_batches": 1}),
        (False, {"accumulate": 1, "of": AccumulationSchedule({0: 1})}),
        (False, {"rows": 4, "of": AccumulationSchedule({0: 1, 1: 2}), "accumulate": 1}),
    ],
)
def test_windows_of_several_micro_batches_are_spoken_of(
    capsys: Any, several: bool, how: dict[str, Any]
) -> None:
    how = dict(how)
    others = [how.pop("of")] if "of" in how else []
    if "module" in how:
        how["module"] = how["module"]()
    fit(*others, **how, max_epochs=2 if others else 1)
    assert bool(rows(capsys)) == several


@pytest.mark.parametrize("accumulate", [1, 3])
def test_guard_of_ones_own_speaks_for_itself(capsys: Any, accumulate: int) -> None:
    class Mine(BatchNormGuard): ...

    fit(Mine("ignore"), accumulate=accumulate)
    assert rows(capsys) == []


@pytest.mark.parametrize("guards", [[], [BatchNormGuard("group_norm")]])
def test_nothing_is_called_exact_before_it_is_measured(
    capsys: Any, guards: Any
) -> None:
    ours = AccumulationCallback(PerSample(), proof="off")
    fit(*guards, accumulate=4, exact=ours)
    said = capsys.readouterr().out
    assert "(2 of 4 micro-batches)" in said
    assert "exact" not in said
