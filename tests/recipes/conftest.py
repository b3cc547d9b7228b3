"""What the tests of recipes share: a user's folders of their own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra.core.global_hydra import GlobalHydra

from tests.recipes.small import QUICK
from trainkit.cli.main import main


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of tokenizers: learned once in all these tests."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def set_up(cache: Path) -> Callable[[Any], Any]:
    """Data that are ready to be trained on."""

    def ready(data: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", str(cache))
            data.setup("fit")
        return data

    return ready


@pytest.fixture
def private_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))


@pytest.fixture
def run_train(
    tmp_path: Path, private_cache: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Path]]:
    """`trainkit train ...` in this process and an empty folder; gives the run's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["trainkit"])

    def run(*overrides: str, name: str = "run") -> Path:
        GlobalHydra.instance().clear()
        folder = tmp_path / name
        assert main(["train", *QUICK, *overrides, f"paths.run_dir={folder}"]) == 0
        return folder

    yield run
    GlobalHydra.instance().clear()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """No recipe's training is called off, but where a test says so."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            mark = pytest.mark.filterwarnings("error:proof. :UserWarning")
            item.add_marker(mark, append=False)
