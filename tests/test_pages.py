"""What the pages name exists: commands, files, groups; and their English is plain."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.plain_english import complaints
from tests.test_readme import CLI, PAGES, README, ROOT, blocks
from trainkit.cli.composition import Composition
from trainkit.cli.main import main


@pytest.mark.parametrize("name", PAGES)
def test_commands_are_those_of_the_makefile(name: str) -> None:
    named = re.findall(r"(?:^|`)make (\w+)", PAGES[name], flags=re.MULTILINE)
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(named) <= set(targets)


def test_front_page_begins_with_two_commands() -> None:
    named = re.findall(r"^make (\w+)", README, flags=re.MULTILINE)
    assert named == ["demo", "test"]


def anchors(page: str) -> set[str]:
    """As GitHub makes them of headings."""
    prose = re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.*)$", prose, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", t.lower()).replace(" ", "-") for t in titles}


@pytest.mark.parametrize("name", PAGES)
def test_what_it_links_to_exists(name: str) -> None:
    for target in re.findall(r"\]\((?!http)([^)]+)\)", PAGES[name]):
        file, _, anchor = target.partition("#")
        path = (ROOT / name).parent / file if file else ROOT / name
        assert path.exists(), target
        assert not anchor or anchor in anchors(path.read_text()), target


@pytest.mark.parametrize("name", PAGES)
def test_modules_that_it_runs_exist(name: str) -> None:
    for module in re.findall(r"python -m ([\w.]+)", PAGES[name]):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists(), module


def test_files_that_contributing_names_exist() -> None:
    """Files by their path; folders of lit in the picture, each of them."""
    page = PAGES["CONTRIBUTING.md"]
    for path in re.findall(r"`((?:core|lit)/[\w/]+(?:\.py|/))`", page):
        assert (ROOT / "trainkit" / path).exists(), path
    shown = set(re.findall(r"^   \|  (\w+)/ ", page, flags=re.MULTILINE))
    inits = (ROOT / "trainkit" / "lit").glob("*/__init__.py")
    assert shown == {path.parent.name for path in inits}


SHELL_BLOCKS = [block for name in PAGES for block in blocks(name, "bash")]
COMMANDS = [
    shlex.split(line, comments=True)
    for block in SHELL_BLOCKS
    for line in block.replace("\\\n", " ").splitlines()
    if line.startswith("trainkit ")
]


def test_there_are_commands_of_every_kind_and_every_sweep_exists() -> None:
    assert {words[1] for words in COMMANDS} == {
        *("new", "train", "fit", "sweep", "plan", "check", "lengths"),
        *("validate", "test", "predict"),
    }
    for words in COMMANDS:
        assert words[1] != "sweep" or (ROOT / words[2]).exists()


TRAININGS = [
    list(words)
    for words in dict.fromkeys(map(tuple, COMMANDS))
    if words[1] == "train" and "ckpt_path=last" not in words
]


def first_value(word: str) -> str:
    """An override with the first of its values, or the start of its interval."""
    return re.sub(r"tag\(log,|interval\(", "", word).split(",")[0]


@pytest.mark.parametrize("words", TRAININGS, ids=" ".join)
def test_every_training_it_names_composes(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if "hparams_search=optuna" in words:  # in an environment of its own
        pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    flags = [word for word in words[2:] if word != "-m"]
    assert Composition([*map(first_value, flags)]).config.trainer


@pytest.mark.parametrize("words", [w for w in COMMANDS if w[1] == "plan"], ids=" ".join)
def test_every_plan_it_names_is_made(words: list[str]) -> None:
    small = ["model.d_model=8", "data.max_length=64"] if "--probe" in words else []
    assert main([*words[1:], *small]) == 0


@pytest.mark.parametrize(
    "words", [w for w in COMMANDS if w[1] == "check"], ids=" ".join
)
def test_every_check_it_names_measures(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each of these trainings is not exact, and is explained."""
    monkeypatch.chdir(tmp_path)
    at = words.index("train")
    small = ["model.d_model=8"] if "experiment=digits_bn" not in words else []
    assert main([*words[1:at], "--rows=8", *words[at:], *small]) == 1
    out = capsys.readouterr().out
    assert "rows see each other" in out or "accumulation=per_token" in out
    assert (tmp_path / "check.html").exists() == ("--html" in words)


MY_PROJECT = """
import torch
from lightning.pytorch import LightningDataModule, LightningModule


class MyModule(LightningModule):
    def __init__(self, width: int = 2):
        super().__init__()


class MyData(LightningDataModule):
    pass
"""


@pytest.fixture
def my_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file in the current folder, as the pages have it, and the groups beside it."""
    (tmp_path / "my_project.py").write_text(MY_PROJECT)
    (tmp_path / "conf").symlink_to(ROOT / "conf")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["trainkit"])
    monkeypatch.setenv("TRAINKIT_ALLOW", "my_project")
    yield tmp_path
    sys.modules.pop("my_project", None)


@pytest.mark.parametrize("words", [w for w in COMMANDS if w[1] == "fit"], ids=" ".join)
def test_every_fit_it_names_is_parsed(
    words: list[str], my_project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = "--model=my_project.MyModule"
    given = [model if word == "..." else word for word in words[1:]]
    assert main([*given, "--print_config"]) == 0
    assert "PerToken" in capsys.readouterr().out


def test_a_model_of_ones_own_composes(
    my_project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    block = next(each for each in blocks(CLI, "yaml") if "_target_" in each)
    folder = my_project / "own" / "model"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(block)
    assert main(["train", "--cfg=job", "--config-dir=own", "model=mine"]) == 0
    assert "_target_: my_project.MyModule" in capsys.readouterr().out


def options_in(cell: str) -> set[str]:
    """The names in a cell, but for those in addresses of links."""
    return set(re.findall(r"`(\w+)`", re.sub(r"\]\([^)]*\)", "", cell)))


def test_table_of_groups_names_every_group_and_option() -> None:
    table = PAGES[CLI].partition("| group | options |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", table, flags=re.MULTILINE)
    shown = {
        group: options_in(options)
        for groups, options in rows
        for group in re.findall(r"`(\w+)`", groups)
    }
    files: dict[str, set[str]] = {}
    for path in (ROOT / "conf").glob("*/*.yaml"):
        files.setdefault(path.parent.name, set()).add(path.stem)
    sweeps = files.pop("sweep")  # for `trainkit sweep`
    assert shown == files
    section = PAGES[CLI].partition("## Sweeps")[2]
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == sweeps


# ---- the check for plain English finds a phrase wherever a person reads it -----------


MODULE = '''"""The same, for two."""

def whoever(told):  # a name is code, and is not read
    # The run goes
    # on, as before.
    raise ValueError(
        f"seed {told}: it is "
        "none"
    )
'''


def test_finds_phrases_in_docstrings_comments_messages_and_pages(tmp_path: Path):
    for folder in ("trainkit", "conf", "tests"):
        (tmp_path / folder).mkdir()
    (tmp_path / "trainkit/a.py").write_text(MODULE)
    (tmp_path / "tests/a.py").write_text(MODULE)
    (tmp_path / "conf/a.yaml").write_text("a: as ever # as\n# ever\n")
    (tmp_path / "README.md").write_text("One.\n\nIt was\n  told of it.\n")
    assert complaints(tmp_path) == [
        "README.md:3: 'was told'; say: announced, known",
        "conf/a.yaml:1: 'as ever'; say: as before, as usual",
        "trainkit/a.py:1: 'The same'; say: say what it is",
        "trainkit/a.py:7: 'is none'; say: is not a ..., has no ...",
        "trainkit/a.py:4: 'goes on'; say: resume, continue",
    ]


def test_finds_nothing_here():
    assert complaints(ROOT) == []
