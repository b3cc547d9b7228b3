"""Whether a model sees its padding is measured, from the first window that has some."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from tests.core.split.common import mask_of
from tests.helpers import deviation, trainer, weights
from trainkit import AccumulationMixin, PerSample
from trainkit.core.split.micro_batching import MicroBatching
from trainkit.lit.callback.base import is_rehearsal
from trainkit.lit.proof.first_batch import FirstBatches

SEES = "the model sees its padding"
LENGTHS = [7, 2, 12, 3, 5, 1, 9, 4]


def batch_of(lengths: list[int], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mask = mask_of(lengths, padded_length=14)
    ids = torch.randint(1, 9, mask.shape, generator=generator) * mask
    y = torch.randn(len(lengths), generator=generator, dtype=torch.float64)
    return {"ids": ids, "attention_mask": mask, "y": y}


FULL = batch_of([14] * 8, 3)
BATCHES = [batch_of(LENGTHS, 0), FULL, batch_of(LENGTHS[::-1], 1)]


class Pooled(AccumulationMixin, pl.LightningModule):
    """A number for each row, from its tokens."""

    def __init__(self, cut: MicroBatching | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.accumulation = PerSample()
        self.micro_batching = cut
        self.embed = nn.Embedding(9, 6)
        self.conv = nn.Conv1d(6, 6, 3, padding=1)
        self.head = nn.Linear(6, 1)
        self.double()

    def pooled(self, hidden: Tensor, mask: Tensor) -> Tensor:
        return (hidden * mask).sum(1) / mask.sum(1)

    def hidden(self, batch: Any) -> Tensor:
        return self.embed(batch["ids"]).tanh()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        pooled = self.pooled(self.hidden(batch), batch["attention_mask"].unsqueeze(2))
        return F.mse_loss(self.head(pooled).squeeze(1), batch["y"])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3)


class Convolving(Pooled):
    def hidden(self, batch: Any) -> Tensor:
        return self.conv(self.embed(batch["ids"]).transpose(1, 2)).transpose(1, 2)


class MeanOfAll(Pooled):
    def pooled(self, hidden: Tensor, mask: Tensor) -> Tensor:
        return hidden.mean(1)


def fit(
    module: pl.LightningModule, batches: Any = BATCHES, window: int = 1, **options: Any
) -> pl.Trainer:
    fitted = trainer(window, **{"max_epochs": 1, **options})
    fitted.fit(module, DataLoader(batches, batch_size=None))
    return fitted


def off(kind: Callable[..., Any], cut: MicroBatching, batches: Any = BATCHES) -> float:
    """From the weights that whole batches give."""
    made = kind(cut), kind(None)
    for module in made:
        fit(module, batches)
    return deviation(*made, kind())


CUTS = [MicroBatching(size=2), MicroBatching(tokens=30), MicroBatching("auto")]


@pytest.mark.parametrize("cut", CUTS, ids=["rows", "tokens", "auto"])
@pytest.mark.parametrize("kind", [Convolving, MeanOfAll])
def test_model_that_sees_its_padding_is_not_trimmed(
    kind: type[Pooled], cut: MicroBatching
) -> None:
    with pytest.warns(
        UserWarning, match=rf"{SEES}: without it, the gradient of some rows is off by"
    ):
        assert off(kind, cut) < 1e-12


def test_rows_that_fill_the_width_tell_nothing_of_padding() -> None:
    """The shortest four of four rows have all columns of the batch."""
    few = [batch_of([3, 14, 14, 3], seed) for seed in range(2)]
    with pytest.warns(UserWarning, match=SEES):
        assert off(MeanOfAll, MicroBatching(size=2), few) < 1e-12


@pytest.mark.parametrize("kind", [Convolving, MeanOfAll])
def test_trimming_without_measuring_gives_other_weights(
    kind: type[Pooled], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control."""
    monkeypatch.setattr(FirstBatches, "may_trim", lambda *args: True)
    assert off(kind, CUTS[0]) > 1e-2


@pytest.mark.parametrize("cut", CUTS, ids=["rows", "tokens", "auto"])
def test_model_that_masks_its_padding_is_trimmed(cut: MicroBatching) -> None:
    assert off(Pooled, cut) < 1e-12
    widths: list[int] = []

    class Watching(Pooled):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            widths.append(batch["ids"].shape[1])
            return super().training_step(batch, batch_idx)

    fit(Watching(MicroBatching(size=2)))
    assert widths[:2] == [4, 14]  # rehearsed with the shortest rows
    assert sorted(widths[2:6]) == [2, 4, 7, 12]
    assert widths[6:10] == [14] * 4  # has no padding
    assert len(widths) == 2 + 3 * 4


def test_it_is_measured_in_the_first_window_that_has_padding() -> None:
    with pytest.warns(UserWarning, match=SEES):
        assert off(MeanOfAll, CUTS[0], [FULL, FULL, BATCHES[0]]) < 1e-12
    assert off(MeanOfAll, CUTS[0], [FULL, FULL]) < 1e-12


class Rich(Pooled):
    """It changes all that a training step can, and draws random numbers."""

    def __init__(self, cut: MicroBatching | None = None) -> None:
        super().__init__(cut)
        self.drop = nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(6, dtype=torch.float64)
        self.metric = MeanMetric()
        self.register_buffer("moving", torch.zeros(()))
        self.teacher = nn.Linear(1, 1, dtype=torch.float64).requires_grad_(False)
        self.seen: list[int] = []
        self.drawn = 0.0

    def pooled(self, hidden: Tensor, mask: Tensor) -> Tensor:
        return self.norm(self.drop(super().pooled(hidden, mask)))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.moving += 1
        self.seen.append(len(batch["ids"]))
        self.drawn = random.random() + float(torch.rand(()))
        self.teacher.weight.data.add_(1)
        batch["y"].mul_(1.5)  # of its own
        loss = super().training_step(batch, batch_idx)
        self.metric(loss.detach())
        self.log("loss", loss, on_epoch=True)
        self.log_exact("exact", loss, batch)
        return {"loss": loss, "rows": len(batch["ids"])}

    def state(self) -> Any:
        return (
            weights(self),
            [buffer.clone() for buffer in self.buffers()],
            torch.tensor([*self.seen, self.drawn, self.metric.update_count]),
            self.metric.compute(),
            self.teacher.weight.clone(),
            torch.get_rng_state(),
            torch.tensor([module.training for module in self.modules()]),
        )


@pytest.mark.filterwarnings("ignore:training_step has changed")
@pytest.mark.filterwarnings("ignore:BatchNorm")
def test_all_that_it_changes_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # seed_everything sets them
        monkeypatch.setenv(variable, "0")
    ends = []
    logged = []
    for measures in (True, False):
        if not measures:
            monkeypatch.setattr(FirstBatches, "may_trim", lambda *args: True)
        batches = [{k: v.clone() for k, v in b.items()} for b in BATCHES[:1]]
        pl.seed_everything(1, verbose=False)
        module = Rich(MicroBatching(size=4))
        fitted = fit(module, batches)
        ends.append(module.state())
        logged.append({k: float(v) for k, v in fitted.callback_metrics.items()})
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=0)
    assert logged[0] == logged[1]
    assert {"loss", "exact"} <= set(logged[0])


class Random(Pooled):
    def hidden(self, batch: Any) -> Tensor:
        hidden = super().hidden(batch)
        return hidden + torch.randn_like(hidden)


def test_noise_by_row_is_the_same_with_padding_and_without() -> None:
    fit(Random(CUTS[0]))


class Limited(Pooled):
    """Some positions only."""

    def hidden(self, batch: Any) -> Tensor:
        if batch["ids"].shape[1] > 13:
            raise IndexError("no such position")
        return super().hidden(batch)


def test_error_in_the_untrimmed_run_leaves_padding_in(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(IndexError, match="no such position"):
        fit(Limited(CUTS[0]), BATCHES[:1])
    said = capsys.readouterr().out
    assert "trainkit | trimming: micro-batches keep the loader batch's width" in said
    assert "measured whether the model sees its padding: IndexError: no such" in said


class Broken(Pooled):
    def hidden(self, batch: Any) -> Tensor:
        raise IndexError("a mistake")


def test_mistake_in_the_step_is_raised_as_it_is() -> None:
    with pytest.raises(IndexError, match="a mistake"):
        fit(Broken(CUTS[0]))


class Differentiating(Pooled):
    """Needs gradients in its step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        (slope,) = torch.autograd.grad(loss, self.head.weight, create_graph=True)
        return loss + 0.1 * slope.square().sum()


def test_step_that_takes_gradients_itself_is_measured_with_them() -> None:
    fit(Differentiating(CUTS[0]))

    class Seeing(Differentiating, MeanOfAll): ...

    with pytest.warns(UserWarning, match=SEES):
        fit(Seeing(CUTS[0]))


class Terms(MeanOfAll):
    def __init__(self, cut: MicroBatching | None = None) -> None:
        super().__init__(cut)
        self.accumulation = {"a": PerSample(), "b": PerSample()}

    def training_step(self, batch: Any) -> Any:  # type: ignore[override]
        loss = super().training_step(batch, 0)
        return {"loss": {"a": 0 * loss, "b": loss}}


def test_every_term_is_compared_also_without_a_batch_index() -> None:
    with pytest.warns(UserWarning, match=SEES):
        fit(Terms(CUTS[0]))


@pytest.mark.parametrize(
    ("precision", "kind"),
    [("32-true", Pooled), ("bf16-mixed", Pooled), ("bf16-true", Pooled)],
)
def test_rounding_is_no_difference(precision: Any, kind: Any) -> None:
    batches = [
        {k: v.float() if k == "y" else v for k, v in batch.items()} for batch in BATCHES
    ]
    module = kind(CUTS[0]).float()
    fit(module, batches, precision=precision)
    seeing = MeanOfAll(CUTS[0]).float()
    with pytest.warns(UserWarning, match=SEES):
        fit(seeing, batches, precision=precision)


class Transformer(Pooled):
    """Its fast path in eval mode is another computation."""

    def __init__(self, cut: MicroBatching | None = None) -> None:
        super().__init__(cut)
        layer = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=True)
        self.double()

    def hidden(self, batch: Any) -> Tensor:
        padding = batch["attention_mask"] == 0
        return self.encoder(super().hidden(batch), src_key_padding_mask=padding)


def test_transformer_with_dropout_and_a_mask_is_trimmed() -> None:
    fit(Transformer(CUTS[0]))


def test_windows_of_several_loader_batches() -> None:
    cut, whole = MeanOfAll(CUTS[0]), MeanOfAll()
    with pytest.warns(UserWarning, match=SEES):
        fit(cut, BATCHES, window=3)
    fit(whole, [{k: torch.cat([b[k] for b in BATCHES]) for k in FULL}])
    assert deviation(cut, whole, MeanOfAll()) < 1e-12


class Short(Pooled):
    """Its memory runs out in rehearsals, so many times."""

    failures = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if is_rehearsal(self.trainer) and Short.failures:
            Short.failures -= 1
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().training_step(batch, batch_idx)


class ShortAndSeeing(Short, MeanOfAll): ...


@pytest.mark.parametrize("failures", [0, 1, 2])
@pytest.mark.parametrize("how", [{"how": "auto"}, {"size": 2}])
def test_memory_that_runs_out_while_it_is_rehearsed_costs_no_exactness(
    how: dict[str, Any], failures: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """One row is rehearsed then, and if that fails, windows are not trimmed."""
    Short.failures = failures
    seeing = ShortAndSeeing(MicroBatching(**how))
    fails = failures == 2
    with nullcontext() if fails else pytest.warns(UserWarning, match=SEES):
        fit(seeing, [BATCHES[0], *BATCHES])
    assert ("OutOfMemoryError" in capsys.readouterr().out) == fails
    whole = MeanOfAll()
    fit(whole, [BATCHES[0], *BATCHES])
    assert deviation(seeing, whole, Pooled()) < 1e-12


class ZeroHead(MeanOfAll):
    """Its first loss is the same whatever is pooled."""

    def __init__(self, cut: MicroBatching | None = None) -> None:
        super().__init__(cut)
        nn.init.zeros_(self.head.weight)


class ZeroBranch(Pooled):
    """A convolution that begins at 0."""

    def __init__(self, cut: MicroBatching | None = None) -> None:
        super().__init__(cut)
        self.scale = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def hidden(self, batch: Any) -> Tensor:
        hidden = super().hidden(batch)
        return hidden + self.scale * self.conv(hidden.transpose(1, 2)).transpose(1, 2)


class InTraining(Pooled):
    """Takes all columns in training mode alone."""

    def pooled(self, hidden: Tensor, mask: Tensor) -> Tensor:
        return hidden.mean(1) if self.training else super().pooled(hidden, mask)


class Recomputing(MeanOfAll):
    """Its backward pass runs parts of the forward pass again."""

    def hidden(self, batch: Any) -> Tensor:
        return checkpoint(super().hidden, batch, use_reentrant=False)


HIDDEN = [ZeroHead, ZeroBranch, InTraining, Recomputing]


@pytest.mark.parametrize("kind", HIDDEN)
def test_what_the_first_loss_hides_is_seen(kind: type[Pooled]) -> None:
    with pytest.warns(UserWarning, match=SEES):
        assert off(kind, CUTS[0], [*BATCHES, *BATCHES]) < 1e-12


@pytest.mark.parametrize("kind", HIDDEN)
def test_trimmed_it_gives_other_weights(
    kind: type[Pooled], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control."""
    monkeypatch.setattr(FirstBatches, "may_trim", lambda *args: True)
    assert off(kind, CUTS[0], [*BATCHES, *BATCHES]) > 1e-3
