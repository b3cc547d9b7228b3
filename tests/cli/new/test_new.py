"""`trainkit new`: a folder that trains at once, and is its recipe."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from tests.cli.training import run_dirs
from trainkit.cli.composition import Composition
from trainkit.cli.main import main
from trainkit.cli.new.main import DEFAULT
from trainkit.cli.new.recipe import Recipe

FEW = [
    "trainer.max_epochs=1",
    "trainer.log_every_n_steps=1",
    "data.num_train=20",
    "data.num_val=8",
    "data.batch_size=4",
    "pictures=false",
]


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "lines", raising=False)
    monkeypatch.setattr(sys, "argv", ["trainkit"])
    GlobalHydra.instance().clear()


def made(*words: str) -> Path:
    assert main(["new", "mine", *words]) == 0
    return Path("mine").resolve()


def composed(*words: str) -> dict[str, Any]:
    """A configuration, without the names by which a copy differs."""
    config = Composition(words).config
    found: Any = OmegaConf.to_container(config, resolve=False)
    text = yaml.safe_dump({**found, "name": None})
    return yaml.safe_load(re.sub(r"trainkit\.recipes\.", "", text))


@pytest.mark.parametrize("name", Recipe.names())
def test_a_folder_has_the_configuration_of_its_recipe(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = composed(f"experiment={name}")
    folder = made("--like", name)
    assert composed() == composed("experiment=demo") != recipe  # the control: outside
    monkeypatch.chdir(folder)
    assert composed() == recipe
    assert Composition([]).config.name == "mine"
    assert Composition([]).config.model._target_.startswith(f"{name}.")


@pytest.mark.parametrize("name", Recipe.names())
def test_its_sweep_is_around_its_own_rate(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(made("--like", name))
    sweep = yaml.safe_load(Path("sweep.yaml").read_text())
    ((key, swept),) = sweep["parameters"].items()
    rate = OmegaConf.select(Composition([]).config, key)
    assert swept["values"] == pytest.approx([rate / 10, rate * 0.3, rate, rate * 3])
    assert sweep["metric"]["name"] == Composition([]).config.metric
    other = OmegaConf.select(Composition([f"{key}=5"]).config, key)
    assert other not in swept["values"]  # the control


@pytest.mark.parametrize("name", Recipe.names())
def test_a_folder_needs_no_recipe_of_trainkit(name: str) -> None:
    folder = made(f"--like={name}")
    for path in folder.rglob("*.*"):
        if path.is_file():
            assert "trainkit.recipes" not in path.read_text(), path
            assert f"experiment={name}" not in path.read_text(), path
    modules = {path.stem: ast.parse(path.read_text()) for path in folder.glob("*.py")}
    for path in folder.glob("conf/*/*.yaml"):
        for module, cls in re.findall(r"_target_: (\w+)\.(\w+)$", path.read_text()):
            defined = [
                n.name for n in modules[module].body if isinstance(n, ast.ClassDef)
            ]
            assert cls in defined, path


def test_it_trains_what_stands_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made()
    source = (folder / "lines.py").read_text()
    (folder / "lines.py").write_text(
        source.replace("width: int = 128", "width: int = 3")
    )
    monkeypatch.chdir(folder)
    assert main(["train", *FEW, "~model.width"]) == 0
    (run,) = run_dirs(folder)
    assert run.is_relative_to(folder / "outputs" / "mine")
    assert sys.modules["lines"].Classifier().conv.out_channels == 3  # the control
    assert "lines.Classifier" in (run / "config.yaml").read_text()


def test_its_test_measures_the_training(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = made()
    module: dict[str, Any] = {"__file__": str(folder / "test_lines.py")}
    exec((folder / "test_lines.py").read_text(), module)
    test = module["test_a_window_is_the_big_batch"]
    test(monkeypatch)
    assert "verdict: exact" in capsys.readouterr().out
    lines = (folder / "lines.py").read_text()  # the control: rows that see each other
    (folder / "lines.py").write_text(
        lines.replace("found.amax(-1)", "found.amax(-1) - found.amax((0, 2))")
    )
    monkeypatch.delitem(sys.modules, "lines")
    with pytest.raises(AssertionError):
        test(monkeypatch)


def test_the_experiment_default_of_a_folder_stays_for_other_choices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(made())
    assert Composition(["model=moe"]).config.data._target_ == "lines.Lines"
    assert Composition(["experiment=demo"]).config.name == "code_lm"
    assert Composition(["~experiment", "data=moe"]).config.optimizer == {}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "followed by the name of one folder, received none"),
        (["a", "b"], "one folder, received a b"),
        (["mine", "--like"], "--like"),
        (["mine", "--like", "line"], "received 'line'. Did you mean lines?"),
        (["mine", "--like="], "must be one of batch_size, code_lm"),
        (["mine", "--liek=moe"], "--liek: must be --like RECIPE"),
        (["it's"], "letters, digits"),
        (["a b"], "letters, digits"),
        (["-"], "must be --like"),
        (["full"], "new or empty, received full"),
        (["file.txt"], "new or empty, received file.txt"),
        (["file.txt/deep"], "cannot be written"),
    ],
)
def test_a_mistake_makes_nothing(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("full").mkdir()
    Path("full", "a").touch()
    Path("file.txt").touch()
    before = sorted(Path().rglob("*"))
    assert main(["new", *(words or ["--like=moe"])]) == 2
    shown = capsys.readouterr().err
    assert said in shown
    assert "Traceback" not in shown
    assert sorted(Path().rglob("*")) == before


def test_the_help_lists_the_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", "--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in Recipe.names())
    assert DEFAULT in Recipe.names()


def test_a_package_that_is_missing_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made("--like=moe")
    assert "needs" not in capsys.readouterr().out  # the control
    monkeypatch.setattr("trainkit.cli.new.recipe.find_spec", lambda name: None)
    assert main(["new", "other"]) == 0
    assert "pip install 'lightning-trainkit[recipes]'" in capsys.readouterr().out
