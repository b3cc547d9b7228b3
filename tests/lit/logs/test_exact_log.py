"""`log_exact` equals the loss over the whole set as one batch, in resumed runs too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from tests.helpers import (
    TokenModule,
    loader,
    pad,
    quiet_lightning,
    ragged_sequences,
    raise_rank_errors,
    rank_loader,
    run_cases,
    run_ranks,
    token_loss,
    trainer,
)
from tests.lit.resume.interrupting import (
    Exactly,
    KillAt,
    ask,
    close,
    differing,
    interrupted,
    rows,
    state_of,
    train,
)
from tests.lit.resume.resuming import SEQUENCES, Resumable, Saving, strip
from tests.lit.resume.test_open_window import DATA, FromBatch, Save
from tests.zoo.callbacks import Table
from tests.zoo.modules import by_hand, hooked
from trainkit import AccumulationMixin, MicroBatching, PerSample, PerToken
from trainkit.errors import TrainkitError
from trainkit.lit.resume.per_rank import PerRank

pytestmark = [
    pytest.mark.filterwarnings("ignore:accumulation. an open window"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
]

TRAIN, EVAL = ragged_sequences(12), ragged_sequences(30, seed=7)
BATCH = 4  # the last batch has two


class Evaluated(AccumulationMixin, TokenModule):
    """Learns nothing, so that the losses of an epoch are of one model."""

    accumulation = PerToken()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log_exact("train/loss", loss.detach(), batch)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = token_loss(self.net, batch, self.reduction)
        self.log_exact("val/loss", loss, batch)
        if self.reduction == "mean" and not loss.isnan():
            self.log("naive", loss, sync_dist=True, batch_size=len(batch["ids"]))
        counts = int(batch["labels"].ne(-100).sum()) * (self.global_rank == 0)
        self.log_exact("val/first", loss, weight=counts, prog_bar=True)

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def one_batch(data: Any = EVAL, module: TokenModule | None = None) -> float:
    """The loss over the whole set, at once."""
    net = (module or TokenModule(dtype=torch.float64)).net
    with torch.no_grad():
        return token_loss(net, pad(data)).item()


def near(number: float) -> Any:
    return pytest.approx(number, rel=1e-12)


SILENT = [(ids, torch.full_like(labels, -100)) for ids, labels in EVAL[8:12]]


@pytest.mark.parametrize(
    ("stage", "reduction", "data", "counts"),
    [
        # transformers#35078: right in training, and times world in evaluation.
        ("validate", "mean", EVAL, EVAL),
        ("test", "sum", EVAL, EVAL),
        ("validate", "total", EVAL, EVAL),
        # llama-cookbook#133: 0 / 0 where all labels of a batch are ignored.
        ("test", "mean", [*EVAL[:8], *SILENT, *EVAL[12:]], EVAL[:8] + EVAL[12:]),
    ],
)
def test_logged_mean_equals_the_loss_of_one_batch(
    stage: str, reduction: Any, data: Any, counts: Any
) -> None:
    module = Evaluated(dtype=torch.float64, reduction=reduction.replace("total", "sum"))
    module.accumulation = PerToken(loss_reduction=reduction)
    (logged,) = getattr(trainer(), stage)(module, loader(data, BATCH), verbose=False)
    assert logged["val/loss"] == near(one_batch(counts))
    if reduction == "mean":  # the control
        assert logged["naive"] != pytest.approx(one_batch(counts), rel=1e-3)


def test_weight_of_its_own_equals_the_mean_with_that_weight() -> None:
    def step(self: Any, batch: Any, batch_idx: int) -> None:
        self.log_exact("index", torch.tensor(float(batch_idx)), weight=batch_idx)
        self.log_exact("rows", float(batch_idx), batch)

    module = hooked(Evaluated, accumulation=PerSample(), validation_step=step)()
    (logged,) = trainer().validate(module, loader(EVAL, BATCH), verbose=False)
    assert logged["index"] == near(sum(i * i for i in range(8)) / sum(range(8)))
    assert logged["rows"] == near((4 * sum(range(7)) + 2 * 7) / 30)


def test_without_a_strategy_a_weight_is_asked_for() -> None:
    """As beside an inner cut, which needs none. The control passes one."""

    def step(self: Any, batch: Any, batch_idx: int) -> None:
        self.log_exact("index", float(batch_idx), batch, weight=self.counts)

    cut = MicroBatching(size=2, inside="net")
    kind = hooked(Evaluated, accumulation=None, micro_batching=cut)
    weighed = hooked(kind, validation_step=step, counts=3)()
    (logged,) = trainer().validate(weighed, loader(EVAL, BATCH), verbose=False)
    assert logged["index"] == near(3.5)
    bare = hooked(kind, validation_step=step, counts=None)()
    with pytest.raises(TrainkitError, match=r"log_exact\('index'\): without self.acc"):
        trainer().validate(bare, loader(EVAL, BATCH), verbose=False)


def test_two_loaders_are_two_names() -> None:
    def step(self: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log_exact(f"val/{dataloader_idx}", token_loss(self.net, batch), batch)

    module = hooked(Evaluated, validation_step=step)(dtype=torch.float64)
    both: list[DataLoader[Any]] = [loader(TRAIN, 3), loader(EVAL, BATCH)]
    fit = trainer()
    fit.validate(module, both, verbose=False)
    assert float(fit.logged_metrics["val/0"]) == near(one_batch(TRAIN))
    assert float(fit.logged_metrics["val/1"]) == near(one_batch(EVAL))


@pytest.mark.parametrize(
    ("stage", "text"),
    [
        ("validate", r"log\(val/number, .*the tensor must have a single element"),
        ("predict", "trying to log in a `predict` hook"),
    ],
)
def test_a_vector_and_a_prediction_are_refused_by_lightning(
    stage: str, text: str
) -> None:
    def step(self: Any, batch: Any, batch_idx: int) -> None:
        self.log_exact("val/number", torch.ones(3 if stage == "validate" else 1), batch)

    module = hooked(Evaluated, validation_step=step, predict_step=step)()
    with pytest.raises((ValueError, MisconfigurationException), match=text):
        getattr(trainer(), stage)(module, loader(EVAL, BATCH))


def test_logged_means_in_fit_equal_those_of_one_batch(tmp_path: Path) -> None:
    """Each epoch by itself, the sanity check leaves nothing behind, and they can be
    monitored."""
    table = Table()
    saver = ModelCheckpoint(tmp_path, monitor="val/loss", filename="best")
    stopper = EarlyStopping("val/loss", patience=1, min_delta=10.0)
    how: dict[str, Any] = {"logger": table, "log_every_n_steps": 1, "max_epochs": 9}
    how |= {"enable_checkpointing": True, "callbacks": [saver, stopper]}
    fit = trainer(2, **how)
    module = Evaluated(dtype=torch.float64)
    fit.fit(module, loader(TRAIN, 3), loader(EVAL, BATCH))
    for key, data in (("train/loss", TRAIN), ("val/loss", EVAL)):
        assert table.column(key) == [near(one_batch(data))] * 2
    assert fit.current_epoch == 2
    assert float(saver.best_model_score or 0) == near(one_batch(EVAL))


# ---- each kind of window, and several ranks ------------------------------------------


WAYS: dict[str, tuple[type[Evaluated], MicroBatching | None]] = {
    "streamed": (Evaluated, None),
    "by rows": (Evaluated, MicroBatching(size=1)),
    "by tokens": (Evaluated, MicroBatching(tokens=24)),
    "inside": (Evaluated, MicroBatching(size=2, inside="net")),
    "by hand": (by_hand(Evaluated), None),
}
PARTLY_SILENT = [*EVAL[:4], *SILENT, *EVAL[4:14], *SILENT, *EVAL[14:16]]


def mean_of_training(rank: int, world: int, way: str, reduction: Any) -> float:
    """Of an epoch in which some rows, and some loader batches, weigh nothing."""
    kind, cut = WAYS[way]
    how: Any = {"accumulation": PerToken(loss_reduction=reduction), "proof": "off"}
    is_mean = reduction == "mean"
    module = hooked(kind, micro_batching=cut, **how)(
        dtype=torch.float64, reduction="mean" if is_mean else "sum"
    )
    is_split = cut is not None and cut.inside is None
    ddp: Any = {"strategy": "ddp" if world > 1 else "auto", "devices": world}
    fit = trainer(1 if is_split else 2, max_epochs=1, **ddp)
    fit.fit(module, rank_loader(PARTLY_SILENT, 3, rank, world))
    return float(fit.callback_metrics["train/loss"])


@pytest.mark.filterwarnings("ignore:.*none of the window's 3 micro-batches weighs")
@pytest.mark.parametrize("reduction", ["mean", "sum", "total"])
@pytest.mark.parametrize("way", WAYS)
def test_logged_mean_of_training_equals_the_loss_of_one_batch(
    way: str, reduction: str
) -> None:
    found = mean_of_training(0, 1, way, reduction)
    assert found == near(one_batch(PARTLY_SILENT))


def test_logged_mean_of_training_on_ranks_equals_the_loss_of_one_batch() -> None:
    ways: list[tuple[str, str]] = [(way, "mean") for way in WAYS]
    ways += [("by rows", "sum"), ("streamed", "total")]
    cases: Any = {way: (mean_of_training, *way) for way in ways}
    for way, found in run_cases(2, cases).items():
        assert raise_rank_errors(found) == [near(one_batch(PARTLY_SILENT))] * 2, way


def on_ranks(world: int, **options: Any) -> Any:
    ddp: Any = {"strategy": "ddp" if world > 1 else "auto", "devices": world}
    return trainer(4, max_epochs=1, use_distributed_sampler=False, **ddp, **options)


def evaluate_ranks(rank: int, world: int, stage: str) -> dict[str, float]:
    module, fit = Evaluated(dtype=torch.float64), on_ranks(world)
    share = rank_loader(EVAL, BATCH, rank, world)
    if stage == "fit":
        fit.fit(module, rank_loader(TRAIN, BATCH, rank, world), share)
        assert "val/first" in fit.progress_bar_metrics
        return {k: float(v) for k, v in fit.callback_metrics.items()}
    return dict(fit.validate(module, share, verbose=False)[0])


def save_and_resume(rank: int, world: int, path: str) -> list[float]:
    """The mean of a whole epoch, and of one that resumes after six batches."""
    found = []
    for resume in (None, path) if world > 1 else (path,):
        save = [] if resume else [Save(path, after=6)]
        fit = on_ranks(world, callbacks=[PerRank(), *save])
        data = FromBatch(rank, world, 6 if resume else 0)
        fit.fit(Evaluated(dtype=torch.float64), data, ckpt_path=resume)
        found.append(float(fit.callback_metrics["train/loss"]))
    return found


def test_logged_mean_on_ranks_equals_the_loss_of_one_batch(tmp_path: Path) -> None:
    """Also of an epoch that resumes on as many ranks, or on one, with `PerRank`. On
    one of the ranks all weights of a name are zero."""
    path = str(tmp_path / "inside.ckpt")
    cases: Any = {stage: (evaluate_ranks, stage) for stage in ("validate", "fit")}
    found = run_cases(2, {**cases, "resumed": (save_and_resume, path)})
    for stage in ("validate", "fit"):
        for logged in raise_rank_errors(found[stage]):
            assert logged["val/loss"] == near(one_batch())
            assert logged["val/first"] == near(one_batch(EVAL[::2]))
            assert logged["naive"] != pytest.approx(one_batch(), rel=1e-3)
    expected = near(one_batch(DATA))
    assert raise_rank_errors(found["resumed"]) == [[expected] * 2] * 2
    assert raise_rank_errors(run_ranks(save_and_resume, 1, path)) == [[expected]]


# ---- interrupted and gone on ---------------------------------------------------------


def test_interrupted_run_logs_the_same_exact_means(tmp_path: Path) -> None:
    """To the last bit. The hooks take turns, so that each of them dies in both ways."""

    def exact(folder: Path) -> list[tuple[str, str]]:
        found = [row for row in rows(folder) if row.get("train/exact")]
        return [(row["train/exact"], row["train/first"]) for row in found]

    with quiet_lightning():
        whole = state_of(*train(tmp_path, kind=Exactly))
        means = exact(tmp_path)
        assert len(means) == 2
        assert all(mean != first for mean, first in means)
        for batch, hook, dies in (
            (3, "on_after_backward", "stopped"),
            (6, "on_train_batch_end", "killed"),
            (8, "on_validation_end", "stopped"),
            (8, "on_after_backward", "killed"),
        ):
            folder = tmp_path / f"{batch} {dies}"
            kill = KillAt(hook, batch) if dies == "killed" else ask(hook, batch)
            found = interrupted(folder, kill, kind=Exactly)
            assert kill.has_died
            assert differing(whole, state_of(*found)) == []
            assert close(rows(tmp_path), rows(folder)) == []
            assert exact(folder) == means


PLACES = [
    *(("on_train_batch_start", at, 4) for at in (0, 4, 8)),
    *(("on_train_batch_end", at, 4) for at in (0, 3, 8)),
]


@pytest.mark.parametrize(("hook", "at", "window"), PLACES)
def test_resumed_epoch_has_the_mean_of_all_its_batches(
    tmp_path: Path, hook: str, at: int, window: int
) -> None:
    """With `PerRank`, which `ExactResume` brings. Without what the checkpoint holds,
    it is that of the rest."""
    path = tmp_path / "inside.ckpt"

    def trained(*callbacks: Any, resume: Any = None) -> Any:
        # The loader has given the batch that was under way, too.
        replay = int(resume is not None and hook != "on_train_batch_end")
        fit = trainer(window, max_epochs=1, callbacks=[PerRank(), *callbacks])
        module = Evaluated(dtype=torch.float64)
        fit.fit(module, Resumable(replay), ckpt_path=resume, weights_only=True)
        return float(fit.callback_metrics["train/loss"])

    trained(Saving(path, at, hook))
    assert trained(resume=path) == near(one_batch(SEQUENCES))
    if (hook, at) == ("on_train_batch_end", 3):  # the control
        strip(path, PerRank.KEY)
        assert trained(resume=path) != pytest.approx(one_batch(SEQUENCES), rel=1e-3)
