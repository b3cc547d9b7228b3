"""Fine-tuning on completions: what counts, and that the cut of a window does not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from recipes.completions import CompletionLM, Completions
from recipes.completions.completions import DOCUMENTED, END, IGNORED, as_row
from tests.cli.training import summary_of
from tests.helpers import NAIVE, TOLERANCE
from tests.recipes.debugging import small
from tests.recipes.exact import window_is_off_by
from trainkit import PerToken, Uniform

# A Llama takes its norms and its loss in float32, whatever its parameters are.
EXACT = TOLERANCE[torch.float32]


@pytest.fixture(scope="module")
def data(cache: Path) -> Completions:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        made = Completions(num_train=60, num_val=8, vocab_size=300, max_length=120)
        made.setup("fit")
        return made


@pytest.fixture(scope="module")
def module() -> CompletionLM:
    torch.manual_seed(0)
    return CompletionLM(
        vocab_size=300, hidden_size=16, num_layers=1, num_heads=2, max_length=120
    ).double()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_accumulated_rows_equal_the_big_batch(
    size: int, data: Completions, module: CompletionLM
) -> None:
    rows = data.train_rows[:6]
    cuts = [size] * (6 // size)
    strategy = PerToken(shift=True)
    assert module.accumulation == strategy
    assert window_is_off_by(module, strategy, rows, data.collate, cuts=cuts) < EXACT
    naive = window_is_off_by(module, Uniform(), rows, data.collate, cuts=cuts)
    assert naive > NAIVE


def test_without_the_shift_rows_that_begin_with_a_completion_count_too_much(
    module: CompletionLM,
) -> None:
    """A prompt's first label is ignored anyway; without a prompt it is no target."""
    rows = [as_row([], list(range(9, 9 + n)), max_length=99) for n in (2, 30)]
    collate = Completions().collate
    for strategy, is_exact in ((PerToken(shift=True), True), (PerToken(), False)):
        off = window_is_off_by(module, strategy, rows, collate, cuts=[1, 1])
        assert (off < EXACT) is is_exact


def test_only_completions_count(data: Completions) -> None:
    for row in data.train_rows:
        num_prompt = row["labels"].count(IGNORED)
        assert row["labels"][:num_prompt] == [IGNORED] * num_prompt
        assert row["labels"][num_prompt:] == row["input_ids"][num_prompt:] != []
        assert len(row["input_ids"]) <= 120


def test_a_completion_that_is_not_cut_has_an_end(data: Completions) -> None:
    whole = [row for row in data.train_rows if len(row["input_ids"]) < 120]
    assert whole
    assert all(row["input_ids"].index(0) == len(row["labels"]) - 1 for row in whole)
    assert END == "<|end|>"


@pytest.mark.parametrize(
    ("source", "prompt"),
    [
        ('def f(x):\n    """Double."""\n    return 2 * x\n', True),
        ('def f(x):\n    r"""Two\n\n    lines.\n    """\n    return 2 * x\n', True),
        ("def f(x):\n    return 2 * x\n", False),
        ('def f(x):\n    """Nothing follows."""\n', False),
    ],
)
def test_a_prompt_is_a_signature_and_a_docstring(source: str, prompt: bool) -> None:
    found = DOCUMENTED.fullmatch(source)
    assert (found is not None) is prompt
    if found:
        assert found["prompt"].rstrip().endswith('"""')
        assert found["completion"] == "    return 2 * x\n"


def test_the_same_rows_each_time(data: Completions) -> None:
    again = Completions(num_train=60, num_val=8, vocab_size=300, max_length=120)
    again.setup("fit")
    assert again.train_rows == data.train_rows
    assert again.val_rows == data.val_rows


def test_the_debug_size_trains(run_train: Callable[..., Path]) -> None:
    run = run_train(*small("completions"), "trainer.max_steps=2")
    summary = summary_of(run)
    assert summary["status"] == "finished"
    assert summary["steps"] == 2
    assert 0 < summary["metrics"]["val/loss"] < 6
    assert summary["plain_accumulation"]["mean"] > NAIVE
