"""Two distributions with files in one package `trainkit` are refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import trainkit
from trainkit.cli.mixture import refuse_a_mixture
from trainkit.errors import TrainkitError

OURS = "lightning_trainkit-0.1.0"


def install(site: Path, name: str, *files: str) -> None:
    """What pip leaves of a distribution: a record of its files."""
    folder = site / f"{name}.dist-info"
    folder.mkdir()
    rows = [f"{each},sha256=,1\n" for each in (*files, f"{folder.name}/RECORD")]
    (folder / "RECORD").write_text("".join(rows))


@pytest.mark.parametrize("first", ["trainkit/__init__.py", "models.py"])
def test_files_of_both_are_refused(tmp_path: Path, first: str) -> None:
    install(tmp_path, OURS, "trainkit/__init__.py")
    install(tmp_path, "trainkit-0.0.3", first, "trainkit/models.py")
    with pytest.raises(TrainkitError) as refused:
        refuse_a_mixture(tmp_path)
    for text in (
        "must come from one distribution",
        f"lightning-trainkit and of trainkit-0.0.3 in {tmp_path}",
        "Run pip uninstall trainkit lightning-trainkit",
    ):
        assert text in str(refused.value)


@pytest.mark.parametrize(
    "installed",
    [
        {OURS: "trainkit/__init__.py"},
        {"trainkit-0.1.0": "trainkit/__init__.py"},  # it alone
        {OURS: "trainkit/__init__.py", "trainkit-0.0.2": "models/__init__.py"},
        {OURS: "trainkit/__init__.py", "trainkit_x-1": "trainkit/__init__.py"},
        {OURS: "__editable__.pth", "trainkit-0.1.0": "__editable__.trainkit.pth"},
        {},
    ],
)
def test_files_of_one_are_not(tmp_path: Path, installed: dict[str, str]) -> None:
    for name, file in installed.items():
        install(tmp_path, name, file)
    refuse_a_mixture(tmp_path)


def test_the_command_says_it_though_the_other_was_installed_last(
    tmp_path: Path,
) -> None:
    """Then `trainkit/__init__.py` is the other's: it has none of our names."""
    package = tmp_path / "trainkit"
    package.mkdir()
    for path in Path(trainkit.__file__).parent.iterdir():
        if path.name != "__init__.py":
            (package / path.name).symlink_to(path)
    cli = package / "cli"
    cli.unlink()
    cli.mkdir()
    for path in Path(trainkit.__file__).parent.joinpath("cli").glob("*.py"):
        (cli / path.name).write_text(path.read_text())
    (package / "__init__.py").write_text("def fit(): ...\n")
    assert said_by_version(tmp_path)[1].startswith("Traceback")  # the control
    install(tmp_path, OURS, "trainkit/__init__.py")
    install(tmp_path, "trainkit-0.0.3", "trainkit/__init__.py")
    status, said = said_by_version(tmp_path)
    assert status == 2
    assert said.startswith("trainkit: package trainkit: must come from one")


def said_by_version(site: Path) -> tuple[int, str]:
    code = "import sys; sys.path.insert(0, sys.argv.pop(1))\n"
    code += "from trainkit.cli.main import run; run()"
    ended = subprocess.run(
        [sys.executable, "-c", code, str(site), "--version"],
        cwd=site,
        capture_output=True,
        text=True,
        timeout=240,
    )
    return ended.returncode, ended.stderr
