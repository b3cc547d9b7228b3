"""Bytecode of the tests, written once for all workers of a run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from _pytest.assertion import rewrite


def compile_tests(config: pytest.Config) -> None:
    """Write what pytest makes of each test module that will be collected.

    Workers would do it all at the same time, each for itself: half a minute of a new
    clone's first run. Where pytest has changed inside, they do.
    """
    if sys.dont_write_bytecode:
        return
    for given in config.args:
        path = Path(given.split("::")[0])
        for file in sorted(path.rglob("test_*.py")) if path.is_dir() else [path]:
            try:
                _compile(file.absolute(), config)
            except (AttributeError, TypeError, SyntaxError, OSError):
                return


def _compile(file: Path, config: pytest.Config) -> None:
    folder = rewrite.get_cache_dir(file)
    written = folder / (file.stem + rewrite.PYC_TAIL)
    if rewrite._read_pyc(file, written) is None and rewrite.try_makedirs(folder):
        state = config.stash[rewrite.assertstate_key]
        code = rewrite._rewrite_test(file, config)
        rewrite._write_pyc(state, code[1], code[0], written)
