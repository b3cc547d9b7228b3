"""The proof changes nothing of a training, and is left out where it could."""

from __future__ import annotations

import random
import re
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from tests.lit.measure.starting import (
    ALARM,
    SPLIT,
    UNTRIMMED,
    fit,
    images,
    said,
    tokens,
)
from tests.lit.proof import zoo
from tests.lit.proof.zoo import Images, Noisy, Tokens
from trainkit import (
    MicroBatching,
    PerSample,
    PerToken,
    Uniform,
    Weighed,
)


@pytest.mark.filterwarnings("ignore:training_step has changed")
@pytest.mark.parametrize("split", [None, UNTRIMMED])
@pytest.mark.parametrize("proof", ["warn", "require"])
def test_not_a_bit_of_training_changes(split: Any, proof: Any, tmp_path: Path) -> None:
    """`CALLS` counts all calls: with the proof there are more of them, which all moved
    what the module holds."""

    def trained(proof: Any) -> tuple[dict[str, Tensor], list[Any], int]:
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        CALLS.clear()
        module = Moving()
        rows = zoo.sequences()
        loader = DataLoader(rows, 16, shuffle=True, collate_fn=zoo.padded)  # type: ignore[arg-type]
        recorder = Recorder()
        fit(
            module,
            loader,
            PerToken(),
            split,
            accumulate=2,
            callbacks=(recorder,),
            proof=proof,
            max_epochs=2,
            logger=CSVLogger(tmp_path, version=str(proof)),
            log_every_n_steps=1,
        )
        others = [
            module.calls,
            module.seen,
            float(module.metric.compute()),
            module.teacher[0].weight.detach().clone(),
            torch.rand(3),
            random.random(),
            np.random.rand(),
        ]
        lines = (tmp_path / "lightning_logs" / str(proof) / "metrics.csv").read_text()
        others += [len(line) for line in lines.split("\n")]
        return module.state_dict(), [*others, *recorder.found], len(CALLS)

    plain, plain_others, plain_calls = trained("off")
    proved, proved_others, proved_calls = trained(proof)
    assert proved_calls == plain_calls + 4
    assert plain.keys() == proved.keys()
    for name, value in plain.items():
        assert torch.equal(value, proved[name]), name
    for one, other in zip(plain_others, proved_others, strict=True):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))


class Log:
    """What holds a lock is not put back."""

    def __init__(self) -> None:
        self.lock, self.entries = threading.Lock(), list[int]()

    def append(self, entry: int) -> None:
        self.entries.append(entry)

    def clear(self) -> None:
        self.entries.clear()

    def __len__(self) -> int:
        return len(self.entries)


CALLS = Log()


class Moving(Noisy):
    """Moves all that a module can hold, in each training step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running", torch.zeros(1))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.momentum = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.teacher = [nn.Linear(2, 2)]
        self.metric = MeanMetric()
        self.calls, self.seen = 0, [0.0]
        self.own = torch.Generator().manual_seed(3)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        CALLS.append(batch_idx)
        self.calls += 1
        self.seen.append(random.random() + np.random.rand())
        self.running: Any = self.running + torch.rand(1, generator=self.own)
        self.momentum.data.mul_(0.9).add_(torch.rand(WIDTH))
        self.teacher[0].weight.data.mul_(0.9)
        with torch.no_grad():
            self.embed.weight[0] *= 0.5
        batch["ids"][:, 0] = batch["ids"][:, 0].clamp(max=5)
        loss = super().training_step(batch, batch_idx)
        self.metric.update(loss.detach())
        self.log("loss", loss, prog_bar=True)
        assert self.logger is not None
        self.logger.log_metrics({"own": 1.0})
        return loss + 0 * self.norm(self.embed.weight).sum()


WIDTH = zoo.WIDTH


class Recorder(Callback):
    """What callbacks see: losses, logged values, gradients before the step."""

    def __init__(self) -> None:
        self.found: list[Tensor] = []

    def on_before_optimizer_step(
        self, trainer: Any, pl_module: Any, optimizer: Any
    ) -> None:
        self.found.append(pl_module.head.weight.grad.clone())

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.found += [outputs["loss"].clone(), trainer.callback_metrics["loss"]]


def test_uniform_weights_are_exact_for_equal_micro_batches(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fit(Images(zoo.classified), images(), Uniform())
    assert said(capsys).startswith("exact on 4 of your rows")


def test_a_value_that_moves_no_weight_is_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Shown(Images):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) + len(batch[0])

    fit(Shown(zoo.classified), images(), PerSample())
    text = said(capsys)
    assert text.startswith("exact on 5 of your rows")
    assert "the loss's value is off by" in text


def test_uniform_weights_are_not_exact_for_a_mean_over_tokens() -> None:
    with pytest.warns(UserWarning, match="Uniform\\(\\) counts"):
        fit(Tokens(), tokens(), Uniform())


class Fussy(Tokens):
    """Refuses few rows."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        if len(batch["ids"]) < 8:
            raise self.error
        return super().training_step(batch, batch_idx)

    error: Exception = ValueError("needs 8 rows\nsee the manual")


class OutOfMemory(Fussy):
    error = torch.OutOfMemoryError("out of memory: 3 GiB")


class Permuting(Tokens):
    def features(self, batch: dict[str, Any]) -> Tensor:
        hidden = super().features(batch)
        return hidden + hidden[torch.randperm(len(hidden))]


class Casting(Tokens):
    def features(self, batch: dict[str, Any]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().features(batch).float()


class Silent(Tokens):
    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * 0


@pytest.mark.parametrize(
    ("module", "data", "text"),
    [
        (Tokens, lambda: tokens(1), "a loader batch has 1 row, and a step 4"),
        (Fussy, tokens, "ValueError: needs 8 rows"),
        (OutOfMemory, tokens, "OutOfMemoryError: out of memory: 3 GiB"),
        (Permuting, tokens, r"draws by randperm at measure/test_no_trace.py:\d+"),
        (Casting, tokens, "computes in half precision by itself"),
        (Silent, tokens, "the gradient of these rows is zero"),
    ],
)
def test_what_cannot_be_measured_says_so_and_trains(
    capsys: pytest.CaptureFixture[str], module: Any, data: Any, text: str
) -> None:
    callback = fit(module(), data(), PerToken())
    assert callback.last_window is not None
    assert re.fullmatch(f"not measured: .*{text}.*", said(capsys))


class Mixing(Tokens):
    def features(self, batch: dict[str, Any]) -> Tensor:
        hidden = super().features(batch)
        return hidden * torch.tensor(np.random.rand(len(hidden), 1, 1)).float()


class Hooked(Tokens):
    def configure_optimizers(self) -> Any:
        self.head.weight.register_hook(HOOKED.append)
        return super().configure_optimizers()


HOOKED: list[Tensor] = []


def test_numpys_draws_are_replayed_and_hooks_do_not_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fit(Mixing(), tokens(), PerToken())
    assert said(capsys).startswith("exact on 5 of your rows")
    fit(Hooked(), tokens(), PerToken())
    assert said(capsys).startswith("exact on 5 of your rows")
    assert len(HOOKED) == 4  # loader batches


def test_half_precision_parameters_are_not_judged(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(Tokens(), tokens(), PerToken(), precision="bf16-true")
    assert said(capsys).startswith("not measured: the parameters are in half precision")


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true"])
def test_mixed_precision_is_measured_in_full(
    capsys: pytest.CaptureFixture[str], precision: Any
) -> None:
    """In bfloat16 itself, gradients of exact windows are off by up to 5e-3."""
    fit(Tokens(), tokens(), PerToken(), precision=precision)
    found = re.search(r"off by (\S+)", said(capsys))
    assert found is not None
    assert float(found[1]) < 1e-5
    with pytest.warns(UserWarning, match=ALARM):
        fit(Tokens(), tokens(), PerSample(), precision=precision)


def test_augmentation_after_the_transfer_is_replayed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Augmented(Images):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            shift = torch.randn(len(batch[0]), 1, 1, 1)
            return [batch[0] + shift, *batch[1:]]

    for split in (None, SPLIT):
        fit(Augmented(zoo.classified), images(), PerSample(), split)
        assert said(capsys).startswith("exact on 5")


def test_samples_that_are_collated_in_parts_are_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    loader = DataLoader(zoo.sequences(), 16, collate_fn=list)  # type: ignore[arg-type]
    split = MicroBatching(size=4, collate=zoo.padded)
    fit(Tokens(), loader, PerToken(), split)
    assert said(capsys).startswith("exact on 5 of your rows")
    with pytest.warns(UserWarning, match=ALARM):
        fit(Tokens(), loader, PerSample(), split)


def test_padding_that_is_seen_is_not_judged_here(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Parts are padded alike; split windows compare trimmed rows by themselves."""

    class Summed(Tokens):
        def features(self, batch: dict[str, Any]) -> Tensor:
            hidden = super().features(batch)
            return hidden + hidden.sum(1, keepdim=True)

    with pytest.warns(UserWarning, match="the model sees its padding"):
        fit(Summed(), tokens(), PerToken(), SPLIT)
    assert said(capsys).startswith("exact on 5 of your rows")


class SaysHalf(Tokens):
    """Says what its loss divides by, which is half of the batch's tokens."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        labels = batch["labels"].where(batch["ids"] % 2 == 0, -100)
        self.counted = int((labels != -100).sum())
        return super().training_step(batch | {"labels": labels}, batch_idx)


def test_a_weight_that_the_module_says_is_used(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for split in (None, UNTRIMMED):
        by = Weighed(by=lambda module, batch: module.counted)
        fit(SaysHalf(), tokens(), by, split)
        assert said(capsys).startswith("exact on 5 of your rows")
        wrong = Weighed(by=lambda module, batch: len(batch["ids"]))
        with pytest.warns(UserWarning, match=ALARM):
            fit(SaysHalf(), tokens(), wrong, split)
