"""`check` at its edges: few rows, what cannot be repeated, what it leaves behind."""

from __future__ import annotations

import math
import os
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from tests.helpers import quiet_lightning, trainer
from tests.lit.proof.starting import fit, plain_trainer, said, tokens
from tests.lit.proof.test_check import check
from tests.zoo import causes
from tests.zoo.causes import (
    Noisy,
    NormalisedTokens,
    Tokens,
    WithMomentumCopy,
    token_loader,
)
from trainkit import (
    AccumulationCallback,
    MicroBatching,
    PerSample,
    PerToken,
    TrainkitError,
    Uniform,
    Weighed,
)
from trainkit.lit.proof import weights as proof_weights
from trainkit.lit.proof.weights import unknown


def unrepeatable(module: Any, logits: torch.Tensor, batch: Any) -> torch.Tensor:
    scale = 1 + int.from_bytes(os.urandom(2), "big") / 2**15
    return scale * causes.token_mean(module, logits, batch)


@pytest.mark.parametrize("strategy", [PerToken(), Uniform()])
def test_what_cannot_be_repeated_is_never_called_exact(strategy: Any) -> None:
    """Else its own noise would be the tolerance."""
    report = check(Tokens(unrepeatable), token_loader(), strategy=strategy)
    assert not report.exact
    assert [cause.kind for cause in report.causes] == ["randomness"]


class Pair:
    """A batch of a class of the user's."""

    def __init__(self, rows: Any) -> None:
        self.batch = causes.padded(rows)


class OfPairs(Tokens):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch.batch, batch_idx)


def test_a_batch_in_which_nothing_can_be_counted_is_weighed_by_the_module() -> None:
    data: Any = DataLoader(causes.sequences(), batch_size=4, collate_fn=Pair)  # type: ignore[arg-type]

    def targets(module: Any, batch: Any) -> Any:
        return (batch.batch["labels"] != -100).sum()

    assert check(OfPairs(), data, strategy=Weighed(by=targets)).exact
    rows = Weighed(by=lambda module, batch: len(batch.batch["labels"]))
    assert not check(OfPairs(), data, strategy=rows).exact


def only_one(module: Any, logits: torch.Tensor, batch: Any) -> torch.Tensor:
    """Of the rows whose first token is 3, as of pairs that are near each other."""
    chosen = (batch["ids"][:, 0] == 3).to(logits.dtype)
    each = logits.square().mean((1, 2))
    return (each * chosen).sum() / chosen.sum().clamp(min=1)


def test_a_mean_of_which_one_part_has_all_is_no_sum() -> None:
    batch = causes.padded(causes.sequences(12))
    batch["ids"][:, 0], batch["ids"][5, 0] = 1, 3
    (found,) = check(Tokens(only_one), batch, strategy=PerSample()).causes
    assert found.kind == "denominator"
    assert "sum" not in found.text


# ---- what is left behind -------------------------------------------------------------


class Counts(Callback):
    """A callback of the user's, which must see nothing."""

    def __init__(self) -> None:
        self.calls = 0

    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        self.calls += 1


@pytest.mark.filterwarnings("ignore:proof")
@pytest.mark.parametrize("module", [Tokens, Noisy, NormalisedTokens, WithMomentumCopy])
def test_nothing_is_left_behind(module: Any, tmp_path: Any) -> None:
    """Training after a check is bit by bit the training without it."""

    def trained(*, checked: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        random.seed(0)
        made, counts, rows = module(), Counts(), causes.sequences()
        how: Any = {"max_steps": 3, "default_root_dir": tmp_path}
        own = plain_trainer(
            [AccumulationCallback(PerToken()), counts], accumulate_grad_batches=2, **how
        )
        data = DataLoader(rows, 4, shuffle=True, collate_fn=causes.padded)  # type: ignore[arg-type]
        if checked:
            check(made, data, trainer=own)
            assert counts.calls == 0
            assert not any(p.grad is not None for p in made.parameters())
        with quiet_lightning():
            own.fit(made, data)
        return made.state_dict()

    plain, after = trained(checked=False), trained(checked=True)
    assert all(torch.equal(plain[name], after[name]) for name in plain)
    assert all(plain[name].dtype == after[name].dtype for name in plain)
    assert not list(tmp_path.iterdir())


class Logging(Tokens):
    """Logs numbers, a metric, and several at once, under names of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.mean(loss.detach())
        self.log("mean", self.mean)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("later", loss.reshape(1), on_step=False, on_epoch=True)
        self.log_dict({"rows": len(batch["ids"]), "twice": 2 * loss}, prog_bar=True)
        return loss

    def log(self, name: str, *args: Any, **options: Any) -> None:
        super().log(f"train/{name}", *args, **options)


class Reading(Callback):
    """Reads what was logged, as many callbacks do, and may use it."""

    def __init__(self, power: int) -> None:
        self.power = power

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        for held in (trainer.callback_metrics, trainer.logged_metrics):
            assert held["train/loss_step"] * 2 == held["train/twice"]
            assert held["train/mean"].isfinite()
            assert "train/later" not in held  # until the epoch ends
        numbers = trainer.progress_bar_metrics
        assert {*map(type, numbers.values())} == {float}
        assert {*numbers} == {"train/rows", "train/twice"}

    def on_before_optimizer_step(
        self, trainer: Any, pl_module: Any, optimizer: Any
    ) -> None:
        for each in pl_module.parameters():
            each.grad *= trainer.callback_metrics["train/rows"] ** self.power


@pytest.mark.parametrize("power", [0, 1])
def test_hooks_read_what_a_copy_logs(power: int) -> None:
    """A gradient that is scaled by it is another one in parts, which is the control."""
    own = trainer(2, callbacks=[AccumulationCallback(PerToken()), Reading(power)])
    report = check(Logging(), token_loader(), trainer=own)
    assert report.exact == (power == 0), report


# ---- what it is given ----------------------------------------------------------------


class OfTwo(Tokens):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        tokens = batch["tokens"] if isinstance(batch, dict) else batch[0]
        return super().training_step(tokens, batch_idx)


@pytest.mark.parametrize(
    ("combined", "labels"),
    [
        (dict, "tokens.labels"),
        (CombinedLoader, "tokens.labels"),
        (lambda loaders: [*loaders.values()], "0.labels"),
        (lambda loaders: tuple(loaders.values()), "0.labels"),
    ],
)
def test_several_loaders_are_no_batch(combined: Any, labels: str) -> None:
    loaders = combined({"tokens": token_loader(), "others": [*token_loader()]})
    assert check(OfTwo(), loaders, strategy=PerToken(labels=labels)).exact
    assert not check(OfTwo(), loaders, strategy=PerSample()).exact


@pytest.mark.parametrize(("number", "empty"), [(2, []), (3, []), (12, [3]), (20, [])])
def test_one_batch_is_enough(number: int, empty: list[int]) -> None:
    """Also of few rows; one that counts nothing has no mean, and is left out."""
    batch = causes.padded(causes.sequences(number))
    batch["labels"][empty] = -100
    report = check(Tokens(), batch, strategy=PerToken())
    assert (report.exact, report.num_rows) == (True, number)
    assert check(Tokens(), batch, strategy=PerToken(), rows=8).exact
    assert not check(Tokens(), batch, strategy=PerSample()).exact
    assert not check(NormalisedTokens(), batch, strategy=PerToken()).exact


def test_the_report_reads_and_is_plain_data() -> None:
    report = check(Tokens(), token_loader(), strategy=PerSample())
    text = str(report)
    assert "not the big batch: on 24 of your rows" in text
    assert "accumulation = PerToken()" in text
    data = report.as_dict()
    assert data["exact"] is False
    assert data["causes"][0]["kind"] == "denominator"


class Silent(Tokens):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return torch.zeros((), requires_grad=True) * 0.0


def nan_of_few_rows(module: Any, logits: Any, batch: Any) -> Any:
    return logits.mean() * (math.nan if len(logits) < 5 else 1.0)


REFUSED: dict[str, Any] = {
    "the gradient of these rows is zero": Silent,
    "the gradient of these rows is not finite": (
        lambda: Tokens(lambda m, logits, batch: logits.sum() * math.nan)
    ),
    "not measured: cut into parts, these rows have no finite gradient": (
        lambda: Tokens(nan_of_few_rows)
    ),
    "check rows: must be": Tokens,
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_cannot_be_checked_is_refused(text: str) -> None:
    rows = {"rows": 0} if text.startswith("check rows") else {}
    with pytest.raises(TrainkitError, match=text):
        check(REFUSED[text](), token_loader(), strategy=PerToken(), **rows)


class FailsOnFewRows(Tokens):
    def features(self, batch: Any) -> Any:
        assert len(batch["ids"]) == 16
        return torch.nn.functional.dropout(super().features(batch))


def test_a_rehearsal_that_fails_leaves_the_random_states_of_the_run() -> None:
    trained = []
    for proof in ("warn", "off"):
        torch.manual_seed(3)
        module, data = FailsOnFewRows(), tokens(rows=causes.sequences(64))
        with quiet_lightning():
            fit(module, data, PerToken(), proof=proof)
        trained.append(module.head.weight.detach())
    assert torch.equal(*trained)


class ReadsWhatAHookSets(Tokens):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.factor = 1.0 + len(batch["ids"]) % 3

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * self.factor


def test_a_variation_that_does_not_run_is_no_cause() -> None:
    report = check(ReadsWhatAHookSets(), token_loader(), strategy=PerSample())
    assert not report.exact
    assert report.causes


def test_a_part_that_weighs_nothing_is_said_to_weigh_nothing(monkeypatch: Any) -> None:
    monkeypatch.setattr(proof_weights, "_of_classes", lambda *_: None)
    subject: Any = SimpleNamespace(module=SimpleNamespace(accumulate=None))
    subject.alone = SimpleNamespace(best=lambda: torch.tensor([0.5, 0.25, 1e-17]))
    assert "they are as 2, 1, 0" in unknown(subject).text


def test_what_the_run_will_refuse_to_cut_is_not_called_exact(capsys: Any) -> None:
    cut = MicroBatching(tokens=40, collate=causes.padded)
    with pytest.raises(TrainkitError, match="a budget of tokens needs the rows' len"):
        fit(Tokens(), tokens(collate=list), PerToken(), cut)
    assert said(capsys).startswith("not measured: MicroBatching tokens=40: a budget")
