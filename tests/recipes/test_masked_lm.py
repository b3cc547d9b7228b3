"""Masked language modelling: the law of masking, and what has to be counted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recipes.masked_lm import MaskedLM, Paragraphs
from recipes.masked_lm.masked_lm import IGNORED, MASK, mask, read_paragraphs
from tests.cli.training import same_weights, summary_of, weights_of
from tests.helpers import NAIVE
from tests.recipes.debugging import small
from tests.recipes.exact import EXACT, window_is_off_by
from trainkit import PerToken, Uniform

SMALL: dict[str, Any] = {"vocab_size": 300, "max_length": 60, "num_val": 8}


@pytest.fixture(scope="module")
def data(cache: Path) -> Paragraphs:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        made = Paragraphs(num_train=60, tokens=120, **SMALL)
        made.setup("fit")
        return made


@pytest.fixture(scope="module")
def module() -> MaskedLM:
    torch.manual_seed(0)
    return MaskedLM(
        vocab_size=300, hidden_size=16, num_layers=1, num_heads=2, max_length=60
    ).double()


def test_only_the_masked_tokens_make_the_big_batch(
    data: Paragraphs, module: MaskedLM
) -> None:
    """Counting all tokens is not enough, and rows of one length each not either."""
    rows = [data.mask_row(row, epoch=0) for row in data.train_rows[:12]]
    off = {
        name: window_is_off_by(module, strategy, rows, data.collate, cuts=[5, 4, 3])
        for name, strategy in (
            ("masked", PerToken()),
            ("all", PerToken(mask="attention_mask")),
            ("uniform", Uniform()),
        )
    }
    assert off["masked"] < EXACT
    assert off["all"] > NAIVE
    assert off["uniform"] > NAIVE


def test_a_share_of_the_tokens_is_masked_as_in_bert() -> None:
    ids = torch.full((40_000,), 7)
    generator = torch.Generator().manual_seed(0)
    seen, labels = mask(ids, share=0.15, vocab_size=1024, generator=generator)
    chosen = labels != IGNORED
    assert (labels[chosen] == 7).all()
    assert (seen[~chosen] == 7).all()
    # Four standard deviations of what is drawn.
    assert abs(chosen.double().mean() - 0.15) < 0.007
    shares = {"mask": seen == MASK, "same": seen == 7}
    found = {
        name: float(is_so[chosen].double().mean()) for name, is_so in shares.items()
    }
    assert found == pytest.approx({"mask": 0.8, "same": 0.1}, abs=0.021)
    assert (seen[chosen & (seen != MASK)] >= 2).all()  # no padding, no other [MASK]


def test_row_and_epoch_alone_decide_what_is_masked(data: Paragraphs) -> None:
    row = max(data.train_rows, key=lambda each: len(each["input_ids"]))
    first = data.mask_row(row, epoch=3)
    torch.manual_seed(1)
    again = data.mask_row(row, epoch=3)
    assert torch.equal(first["labels"], again["labels"])
    assert torch.equal(first["input_ids"], again["input_ids"])
    others = [data.mask_row(row, epoch=4), data.mask_row({**row, "row": 0}, epoch=3)]
    assert not any(torch.equal(first["labels"], other["labels"]) for other in others)


def test_a_batch_is_masked_as_its_rows_are(
    data: Paragraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "trainer", SimpleNamespace(current_epoch=2))
    num_rows = 0
    for batch in data.train_dataloader():
        masked = data.on_before_batch_transfer(batch, 0)
        assert masked["input_ids"].numel() <= 120
        for place, row in enumerate(batch["row"].tolist()):
            expected = data.mask_row(data.train_rows[row - data.num_val], epoch=2)
            length = len(expected["labels"])
            assert torch.equal(masked["labels"][place, :length], expected["labels"])
            assert (masked["labels"][place, length:] == IGNORED).all()
            num_rows += 1
    assert num_rows == len(data.train_rows)


def test_validation_is_masked_once(data: Paragraphs) -> None:
    (batch,) = data.val_dataloader()
    assert data.on_before_batch_transfer(batch, 0) is batch
    assert (batch["labels"] != IGNORED).any()


def test_there_is_enough_to_read() -> None:
    found = read_paragraphs()
    assert len(found) == len(set(found)) > 1000


def test_the_debug_size_trains_and_goes_on_exactly(
    run_train: Callable[..., Path],
) -> None:
    """From the middle of an epoch on: masks are those that would have been drawn."""
    words = [*small("masked_lm"), "trainer.accumulate_grad_batches=3"]
    words += ["trainer.val_check_interval=6"]
    words += ["scheduler=none"]  # its curve would go by the number of steps
    whole = run_train(*words, "trainer.max_steps=4", name="whole")
    summary = summary_of(whole)
    assert summary["status"] == "finished"
    assert summary["plain_accumulation"]["mean"] > NAIVE
    first = run_train(*words, "trainer.max_steps=2", name="first")
    half_way = weights_of(first)
    last = first / "checkpoints" / "last.ckpt"
    run_train(*words, "trainer.max_steps=4", f"ckpt_path={last}", name="first")
    assert same_weights(weights_of(first), weights_of(whole))
    assert not same_weights(weights_of(whole), half_way)
