"""The language model on functions of the standard library, by bytes and by tokens."""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from recipes.code_lm import CodeLM, Functions
from recipes.code_lm.code_lm import FUNCTION, collate, read_functions
from tests.cli.training import summary_of
from tests.helpers import NAIVE
from tests.recipes.debugging import small
from tests.recipes.exact import EXACT, window_is_off_by
from trainkit import PerToken, Uniform


def outermost(node: ast.AST, lines: list[bytes]) -> Iterator[bytes]:
    """What the parser takes for functions, but for those inside of others."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield b"".join(lines[child.lineno - 1 : child.end_lineno])
        elif isinstance(child, ast.stmt | ast.ExceptHandler):
            yield from outermost(child, lines)


def test_nearly_all_functions_are_those_of_the_parser() -> None:
    parsed: set[bytes] = set()
    for path in Path(sysconfig.get_path("stdlib")).glob("*.py"):
        source = path.read_bytes()
        functions = outermost(ast.parse(source), source.splitlines(keepends=True))
        parsed |= {each.rstrip() + b"\n" for each in functions}
    found = set(read_functions())
    assert len(found & parsed) > 0.97 * max(len(found), len(parsed))


@pytest.mark.parametrize(
    ("source", "functions"),
    [
        (b"def f():\n    pass\nx = 1\n", [b"def f():\n    pass\n"]),
        (b"def f(): pass\ndef g(): pass\n", [b"def f(): pass\n", b"def g(): pass\n"]),
        (b"async def f():\n\n    pass\n\n\n", [b"async def f():\n\n    pass\n\n\n"]),
        (b"def f(\n    a,\n):\n    pass\n)\n", [b"def f(\n    a,\n):\n    pass\n)\n"]),
        (
            b"class A:\n    def f(self):\n        def g(): pass\n    x = 1\n",
            [b"    def f(self):\n        def g(): pass\n"],
        ),
        (b"x = 'def f():'\ndefault = 1\n", []),
    ],
)
def test_a_function_ends_where_its_indentation_does(
    source: bytes, functions: list[bytes]
) -> None:
    assert [found.group() for found in FUNCTION.finditer(source)] == functions


def test_each_label_is_the_next_byte_and_padding_is_none() -> None:
    batch = collate([torch.tensor([1, 2, 3]), torch.tensor([4, 5])])
    assert batch["ids"].tolist() == [[1, 2], [4, 0]]
    assert batch["labels"].tolist() == [[2, 3], [5, -100]]


def test_training_and_validation_share_no_row() -> None:
    data = Functions(num_train=300, num_val=100, max_length=10_000)
    data.setup("fit")
    train = {bytes(row.tolist()) for row in data.train_rows}
    val = {bytes(row.tolist()) for row in data.val_rows}
    assert (len(data.train_rows), len(data.val_rows)) == (300, 100)
    # The library itself has some functions twice, word for word.
    assert len(train & val) <= 3


# ---- byte-level BPE, in split windows ------------------------------------------------


@pytest.fixture
def tokens(private_cache: None) -> Functions:
    data = Functions(vocab_size=300, num_train=60, num_val=8, max_length=40)
    data.setup("fit")
    return data


def test_tokens_are_those_of_the_functions_to_train_on(tokens: Functions) -> None:
    bytes_ = Functions(num_train=60, num_val=8, max_length=40)
    bytes_.setup("fit")
    rows = [*tokens.val_rows, *tokens.train_rows]
    assert len(rows) == len(bytes_.val_rows) + len(bytes_.train_rows) == 68
    assert max(len(row) for row in rows) == 40
    longest = max(int(row.max()) for row in rows)
    assert 256 <= longest < 300  # merges are in use, and the model has room for all
    again = Functions(vocab_size=300, num_train=60, num_val=8, max_length=40)
    again.setup("fit")
    assert all(
        torch.equal(one, other)
        for one, other in zip(tokens.train_rows, again.train_rows, strict=True)
    )


def test_accumulated_functions_equal_the_big_batch(tokens: Functions) -> None:
    torch.manual_seed(0)
    module = CodeLM(
        vocab_size=300, d_model=8, num_layers=1, num_heads=1, max_length=40
    ).double()
    rows, cuts = tokens.train_rows[:12], [5, 4, 3]
    assert window_is_off_by(module, PerToken(), rows, collate, cuts=cuts) < EXACT
    assert window_is_off_by(module, Uniform(), rows, collate, cuts=cuts) > NAIVE


def test_the_debug_size_trains(run_train: Callable[..., Path]) -> None:
    summary = summary_of(run_train(*small("code_lm")))
    assert summary["status"] == "finished"
    assert summary["steps"] == 4
    assert summary["micro_batching"]["tokens"] == 1024
    assert 0 < summary["metrics"]["val/loss"] < 6
