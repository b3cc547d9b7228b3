"""`log_exact` equals the loss over the whole set as one batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from tests.helpers import (
    TokenModule,
    loader,
    pad,
    ragged_sequences,
    raise_rank_errors,
    rank_loader,
    run_ranks,
    token_loss,
    trainer,
)
from tests.lit.logs.test_monitor import Record
from trainkit import AccumulationMixin, PerSample, PerToken
from trainkit.errors import TrainkitError

TRAIN, EVAL = ragged_sequences(12), ragged_sequences(30, seed=7)
BATCH = 4  # the last batch has two


class Evaluated(AccumulationMixin, TokenModule):
    accumulation = PerToken()

    def on_evaluation_batch(self, batch: Any, batch_idx: int, stage: str) -> None:
        loss = token_loss(self.net, batch, self.reduction)
        self.log_exact(f"{stage}/loss", loss, batch)
        if self.reduction == "mean" and not loss.isnan():
            self.log(
                f"{stage}/naive", loss, sync_dist=True, batch_size=len(batch["ids"])
            )

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.on_evaluation_batch(batch, batch_idx, "val")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.on_evaluation_batch(batch, batch_idx, "test")


def one_batch(data: Any = EVAL, module: TokenModule | None = None) -> float:
    """The loss over the whole set, at once."""
    net = (module or TokenModule(dtype=torch.float64)).net
    with torch.no_grad():
        return token_loss(net, pad(data)).item()


def near(number: float) -> Any:
    return pytest.approx(number, rel=2e-7)  # logged in float32


@pytest.mark.parametrize("stage", ["val", "test"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_logged_mean_equals_the_loss_of_one_batch(stage: str, reduction: str) -> None:
    """transformers#35078: right in training, and times world in evaluation."""
    module = Evaluated(dtype=torch.float64, reduction=reduction)
    module.accumulation = PerToken(loss_reduction=reduction)  # type: ignore[arg-type]
    fit = trainer()
    run = fit.validate if stage == "val" else fit.test
    (logged,) = run(module, loader(EVAL, BATCH), verbose=False)
    assert logged[f"{stage}/loss"] == near(one_batch())


def test_log_of_lightning_does_not_equal_the_loss_of_one_batch() -> None:
    module = Evaluated(dtype=torch.float64)
    (logged,) = trainer().validate(module, loader(EVAL, BATCH), verbose=False)
    assert logged["val/naive"] != pytest.approx(one_batch(), rel=1e-3)


def silent(data: Any) -> Any:
    return [(ids, torch.full_like(labels, -100)) for ids, labels in data]


def test_batch_whose_labels_are_all_ignored_does_not_count() -> None:
    """llama-cookbook#133: 0 / 0 in evaluation."""
    module = Evaluated(dtype=torch.float64)
    data = [*EVAL[:8], *silent(EVAL[8:12]), *EVAL[12:]]
    (logged,) = trainer().validate(module, loader(data, BATCH), verbose=False)
    assert logged["val/loss"] == near(one_batch(EVAL[:8] + EVAL[12:]))


def test_weight_of_its_own_equals_the_mean_with_that_weight() -> None:
    class Weighted(Evaluated):
        accumulation = PerSample()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log_exact(
                "val/index", torch.tensor(float(batch_idx)), weight=batch_idx
            )
            self.log_exact("val/rows", torch.tensor(float(batch_idx)), batch)

    (logged,) = trainer().validate(Weighted(), loader(EVAL, BATCH), verbose=False)
    assert logged["val/index"] == near(sum(i * i for i in range(8)) / sum(range(8)))
    assert logged["val/rows"] == near((4 * sum(range(7)) + 2 * 7) / 30)


# ---- inside fit ----------------------------------------------------------------------


class LogsTraining(Evaluated):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log_exact("train/loss", loss.detach(), batch)
        return loss


class Frozen(LogsTraining):
    """Learns nothing, so that the losses of an epoch are of one model."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def test_logged_means_in_fit_equal_those_of_one_batch() -> None:
    """Each epoch by itself; the sanity check leaves nothing behind."""
    record = Record()
    fit = trainer(2, logger=record, log_every_n_steps=1, num_sanity_val_steps=2)
    module = Frozen(dtype=torch.float64)
    fit.fit(module, loader(TRAIN, 3), loader(EVAL, BATCH))
    for key, data in (("train/loss", TRAIN), ("val/loss", EVAL)):
        logged = [row[key] for _, row in record.rows if key in row]
        assert logged == [near(one_batch(data))] * 2


def test_logged_mean_can_be_monitored(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, monitor="val/loss", filename="best")
    stopper = EarlyStopping("val/loss", patience=1, min_delta=10.0)
    module = Evaluated(dtype=torch.float64)
    fit = trainer(
        2, max_epochs=9, enable_checkpointing=True, callbacks=[saver, stopper]
    )
    fit.fit(module, loader(TRAIN, BATCH), loader(EVAL, BATCH))
    assert fit.current_epoch == 2
    assert stopper.best_score.dtype == torch.float32
    best = Evaluated(dtype=torch.float64)
    best.load_state_dict(torch.load(saver.best_model_path)["state_dict"])
    assert float(saver.best_model_score or 0) == near(one_batch(EVAL, best))


def test_two_loaders_are_two_names() -> None:
    class TwoLoaders(Evaluated):
        def validation_step(  # type: ignore[override]  # Lightning's other signature
            self, batch: Any, batch_idx: int, dataloader_idx: int = 0
        ) -> None:
            loss = token_loss(self.net, batch)
            self.log_exact(f"val/{dataloader_idx}", loss, batch)

    both: list[DataLoader[Any]] = [loader(TRAIN, 3), loader(EVAL, BATCH)]
    fit = trainer()
    fit.validate(TwoLoaders(dtype=torch.float64), both, verbose=False)
    assert float(fit.logged_metrics["val/0"]) == near(one_batch(TRAIN))
    assert float(fit.logged_metrics["val/1"]) == near(one_batch(EVAL))


def test_plain_number_can_be_logged_and_a_vector_not() -> None:
    class Plain(Evaluated):
        value: Any = 0.5

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log_exact("val/number", self.value, batch)

    module, fit = Plain(), trainer()
    (logged,) = fit.validate(module, loader(EVAL, BATCH), verbose=False)
    assert logged == {"val/number": 0.5}
    module.value = torch.ones(3)
    with pytest.raises(TrainkitError, match=r"must be one number, .* shape \[3\]"):
        fit.validate(module, loader(EVAL, BATCH), verbose=False)


def test_log_exact_in_prediction_is_refused() -> None:
    class Predicts(Evaluated):
        def predict_step(self, batch: Any, batch_idx: int) -> None:
            self.log_exact("loss", torch.tensor(1.0), batch)

    with pytest.raises(TrainkitError, match=r"log_exact\(\): it logs the mean of an"):
        trainer().predict(Predicts(), loader(EVAL, BATCH))


# ---- several ranks -------------------------------------------------------------------


class Uneven(Evaluated):
    """Rank 1 has no batch for one of the names."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        if self.global_rank == 0:
            loss = token_loss(self.net, batch)
            self.log_exact("val/first", loss, batch, prog_bar=True)


def evaluate_ranks(rank: int, world: int, stage: str) -> dict[str, float]:
    module = Uneven(dtype=torch.float64)
    fit = trainer(
        2, strategy="ddp", devices=world, use_distributed_sampler=False, max_epochs=1
    )
    share = rank_loader(EVAL, BATCH, rank, world)
    if stage == "fit":
        module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), 0.0)
        fit.fit(module, rank_loader(TRAIN, BATCH, rank, world), share)
        assert "val/first" in fit.progress_bar_metrics  # also where it had no batch
        return {k: float(v) for k, v in fit.callback_metrics.items()}
    return dict(fit.validate(module, share, verbose=False)[0])


@pytest.mark.parametrize(("world", "stage"), [(2, "validate"), (2, "fit"), (3, "fit")])
def test_logged_mean_on_ranks_equals_the_loss_of_one_batch(
    world: int, stage: str
) -> None:
    for logged in raise_rank_errors(run_ranks(evaluate_ranks, world, stage)):
        assert logged["val/loss"] == near(one_batch())
        assert logged["val/first"] == near(one_batch(EVAL[::world]))
        assert logged["val/naive"] != pytest.approx(one_batch(), rel=1e-3)
