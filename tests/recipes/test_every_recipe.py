"""What a user finds in the folder of every recipe."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trainkit.cli.composition import Composition
from trainkit.config.check import check_all

HERE = Path(__file__).parents[2] / "recipes"
RECIPES = sorted(path.parent.name for path in HERE.glob("*/__init__.py"))
COMMAND = re.compile(r"^\s*trainkit train .*$", re.MULTILINE)


def test_the_list_has_all_of_them() -> None:
    listed = re.findall(
        r"^\| \[(\w+)\]", (HERE / "README.md").read_text(), re.MULTILINE
    )
    assert sorted(listed) == RECIPES


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_one_file_with_a_readme_and_a_picture(name: str) -> None:
    readme = (HERE / name / "README.md").read_text()
    source = (HERE / name / f"{name}.py").read_text()
    assert f"trainkit train experiment={name}\n" in re.sub(r" +#.*", "", readme)
    assert COMMAND.search(source)
    assert f'\n    train_file(__file__, "experiment={name}"' in source.replace(
        "(\n        ", "("
    )
    for picture in re.findall(r"!\[.+\]\((.+)\)", readme):
        assert 10_000 < (HERE / name / picture).stat().st_size < 150_000
    assert f"{name}.png" in readme
    assert "|---" in readme, "what was measured"


@pytest.mark.parametrize("name", RECIPES)
def test_a_readme_has_a_command_for_each_size(name: str) -> None:
    """Of a few steps, and of a GPU; each sets what there is, also both together."""
    readme = (HERE / name / "README.md").read_text()
    both: dict[str, None] = {}
    for size in ("debug=default", "trainer=gpu"):
        (words,) = re.findall(
            rf"^trainkit train (experiment={name} {size}\b.*?) +#", readme, re.MULTILINE
        )
        both |= dict.fromkeys(words.split())
    check_all(Composition([*both, "paths.run_dir=run"]).config)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_uses_public_names_only(name: str) -> None:
    source = (HERE / name / f"{name}.py").read_text()
    imports = re.findall(r"^ *from (trainkit\S*) import", source, re.MULTILINE)
    assert set(imports) <= {"trainkit", "trainkit.recipes", "trainkit.cli.script"}
