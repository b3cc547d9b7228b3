"""The data of the default run: functions of the standard library."""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from recipes.code_lm import Functions
from recipes.code_lm.code_lm import FUNCTION, collate, read_functions


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
