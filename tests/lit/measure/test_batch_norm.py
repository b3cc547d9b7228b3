"""The proof at the start of a training with exact BatchNorm."""

from __future__ import annotations

import contextlib
import io
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy

from tests.helpers import raise_rank_errors, run_ranks, trainer
from tests.lit.batch_norm.exact_fits import Images, exact, fit, loader
from trainkit import (
    AccumulationCallback,
    BatchNormGuard,
    MicroBatching,
    PerSample,
    check,
)

CUTS: dict[str, Any] = {
    "split": MicroBatching(size=4),
    "inside": MicroBatching(inside="net", size=4),
    "threes": MicroBatching(size=3),
    "whole": None,
}


class Spread(Images):
    """Its loss asks that the rows of a batch differ."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch[0])
        return F.cross_entropy(logits, batch[1]) - logits.std(0).mean()


LEFT: dict[str, Any] = {"scale": 1.0, "weights": torch.ones(1)}
"""What steps leave outside of all modules."""


class SetsBack(Images):
    """Between its two calls of the net it sets back what it has set before them."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        LEFT["scale"] = 2.0
        loss = F.cross_entropy(self.net(x) * LEFT["scale"], y)
        LEFT["scale"] = 1.0
        return loss + F.cross_entropy(self.net(x.flip(3)) * LEFT["scale"], y)


class Overwrites(Images):
    """It weighs rows by what it leaves before it calls the net."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        LEFT["weights"] = x.mean((1, 2, 3))
        losses = F.cross_entropy(self.net(x), y, reduction="none")
        return (losses * LEFT["weights"].repeat(len(x))[: len(x)]).mean()


def said(
    module: Images, cut: str, policy: Any = "exact", proof: Any = "warn", **options: Any
) -> tuple[str, str]:
    """What a training prints of its proof, and what it warns of."""
    callback = AccumulationCallback(PerSample(), micro_batching=CUTS[cut], proof=proof)
    guard = policy if isinstance(policy, BatchNormGuard) else BatchNormGuard(policy)
    out = io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        fit(module, callback, guard, epochs=1, **options)
    lines = [line for line in out.getvalue().split("\n") if "proof" in line]
    alarms = [str(w.message) for w in caught if "proof" in str(w.message)]
    return "; ".join(lines), "; ".join(alarms)


@pytest.mark.parametrize("memory", ["auto", "device", "flat"])
@pytest.mark.parametrize("cut", ["split", "inside"])
def test_it_is_exact_and_changes_nothing(cut: str, memory: Any) -> None:
    proven, unproven = Images(), Images()
    line, alarm = said(proven, cut, BatchNormGuard("exact", memory=memory))
    assert ("exact on 5 of your rows" in line, alarm) == (True, "")
    said(unproven, cut, BatchNormGuard("exact", memory=memory), proof="off")
    pairs = zip(
        proven.state_dict().values(), unproven.state_dict().values(), strict=True
    )
    assert all(torch.equal(one, other) for one, other in pairs)


def test_without_the_policy_the_layers_are_named() -> None:
    line, alarm = said(Images(), "split", "ignore")
    assert line == ""
    assert "as BatchNorm does (net.norm, net.last_norm)" in alarm


def test_with_it_only_the_loss_is_blamed() -> None:
    line, alarm = said(Spread(), "split")
    assert line == ""
    assert "The loss, or a layer that is no BatchNorm, looks across the rows" in alarm
    assert "net.norm" not in alarm
    line, alarm = said(Spread(), "inside")
    assert ("exact on" in line, alarm) == (True, "")


@pytest.mark.parametrize("kind", [SetsBack, Overwrites])
def test_what_micro_batches_change_for_each_other(kind: type[Images]) -> None:
    """One is seen by the last of two steps that take turns, the other by the first."""
    line, alarm = said(kind(), "split")
    assert line == ""
    assert "not the big batch" in alarm
    assert "or micro-batches change something for each other" in alarm
    line, alarm = said(kind(), "inside")
    assert ("exact on" in line, alarm) == (True, "")


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_hooks_on_gradients_run_for_all_rows() -> None:
    module = Images()
    layer: Any = module.net.last_norm
    layer.register_full_backward_hook(lambda of, given, came: (given[0] / 2,))
    line, alarm = said(module, "split")
    assert ("exact on 5 of your rows" in line, alarm) == (True, "")


@pytest.mark.parametrize(("kind", "cause"), [(SetsBack, "turns"), (Spread, "loss")])
def test_check_tells_turns_from_a_loss_across_rows(
    kind: type[Images], cause: str
) -> None:
    callbacks = exact(CUTS["split"])
    report = check(kind(), loader(), trainer=trainer(1, callbacks=callbacks))
    assert [each.kind for each in report.causes] == [cause]
    assert "inside=" in report.causes[0].remedy[0]


KINDS = {
    "split": (Images, "split"),
    "inside": (Images, "inside"),
    "whole": (Images, "whole"),
    "static": (Images, "inside"),
    "spread": (Spread, "split"),
}


def on_a_rank(
    rank: int, world_size: int
) -> tuple[dict[str, tuple[str, str]], dict[str, Any]]:
    """What each kind of training says, and the weights it ends with."""
    found, weights = {}, {}
    for name, (kind, cut) in KINDS.items():
        module = kind()
        ddp = DDPStrategy(process_group_backend="gloo", static_graph=name == "static")
        found[name] = said(
            module,
            cut,
            batches=[loader(8, 16), loader(8, 32)][rank],
            limit_train_batches=2,
            devices=world_size,
            strategy=ddp,
            use_distributed_sampler=False,
        )
        weights[name] = module.state_dict()
    return found, weights


def test_each_rank_measures_by_itself() -> None:
    """Two lines with the inner cut: chunks are rows at once, ranks are one batch."""
    (first, one), (second, other) = raise_rank_errors(run_ranks(on_a_rank, 2))
    for name, num_lines in (("split", 1), ("inside", 2), ("whole", 1)):
        line, alarm = first[name]
        assert (line.count("exact on 4 of your rows"), alarm) == (num_lines, ""), line
    assert "looks across the rows" in first["spread"][1]
    assert "not measured: DDP with static_graph=True" in first["static"][0]
    assert all(second[name] == ("", "") for name in KINDS)
    for name in KINDS:  # no pass has kept DDP from averaging
        pairs = zip(one[name].values(), other[name].values(), strict=True)
        assert all(torch.equal(x, y) for x, y in pairs), name


LABELS: list[Any] = []


class InGlobal(Images):
    """Its labels stand in a global while the net runs."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        LABELS[:] = [batch[1]]
        return F.cross_entropy(self.net(batch[0]), LABELS[0])


def test_an_error_that_only_turns_cause_is_said() -> None:
    line, alarm = said(InGlobal(), "threes", batches=loader(6, 12))
    assert "not measured" in line, alarm
    assert "micro-batches read each other's" in alarm
