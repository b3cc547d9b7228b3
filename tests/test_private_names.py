"""The private names that CONTRIBUTING.md lists are those that are used."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from torch import nn

ROOT = Path(__file__).parents[1]
MODULES_OWN = frozenset(vars(nn.Module()))


def private_names_of_torch() -> set[str]:
    """Those that stand in trainkit outside of every `_compat.py`."""
    found = set()
    for path in (ROOT / "trainkit").rglob("*.py"):
        if path.name == "_compat.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                module, names = node.module or "", [alias.name for alias in node.names]
            elif isinstance(node, ast.Attribute):
                module, names = ast.unparse(node.value), [node.attr]
                if node.attr in MODULES_OWN and module != "self":
                    module = "torch"
            else:
                continue
            if module.partition(".")[0] in ("torch", "lightning", "hydra", "wandb"):
                found |= {name for name in names if re.match("_[^_]", name)}
    return found


def test_private_names_that_contributing_excepts_are_those_there_are() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    excepted = page.partition("of torch stand elsewhere")[2]
    named = re.findall(r"`(_\w+)`", excepted.partition("\n\n")[0])
    assert set(named) == private_names_of_torch()
