"""`trainkit new` makes a folder that trains; `python mine.py` trains its classes."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from tests.cli.training import run_dirs
from trainkit.cli.composition import Composition
from trainkit.cli.main import main
from trainkit.config import targets

FEW = """
trainer.max_epochs=1 trainer.log_every_n_steps=1 data.num_train=20 data.num_val=8
data.batch_size=4 report=false
""".split()


@pytest.fixture(autouse=True)
def nothing_of_another_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "_allowed", set(targets._allowed))
    for name in ("lines", "mine"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def made() -> Path:
    assert main(["new", "mine"]) == 0
    return Path("mine").resolve()


def composed(*words: str) -> dict[str, Any]:
    """A configuration, without the names by which a copy differs."""
    config = Composition(words).config
    found: Any = OmegaConf.to_container(config, resolve=False)
    text = yaml.safe_dump({**found, "name": None})
    return yaml.safe_load(re.sub(r"trainkit\.recipes\.", "", text))


def test_a_folder_has_the_configuration_of_the_recipe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe = composed("experiment=lines")
    folder = made()
    assert composed() == composed("experiment=demo") != recipe  # the control: outside
    monkeypatch.chdir(folder)
    assert composed() == recipe
    assert Composition([]).config.name == "mine"
    assert Composition([]).config.model._target_ == "lines.Classifier"


def test_its_sweep_is_around_its_own_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(made())
    sweep = yaml.safe_load(Path("sweep.yaml").read_text())
    config = Composition([]).config
    ((key, swept),) = sweep["parameters"].items()
    assert OmegaConf.select(config, key) in swept["values"]
    assert (sweep["metric"]["name"], sweep["project"]) == (config.metric, "mine")


def test_a_folder_needs_nothing_of_a_recipe() -> None:
    paths = [path for path in made().rglob("*") if path.is_file()]
    texts = {path.name: path.read_text() for path in paths}
    assert {"README.md", ".gitignore", "lines.py", "test_lines.py"} < set(texts)
    for name, text in texts.items():
        assert "trainkit.recipes" not in text, name
        assert "experiment=lines" not in text, name
        assert "my_project" not in text, name
    readme = texts["README.md"]  # names the extra of its sweep before that
    assert 0 < readme.index("[sweeps]") < readme.index("trainkit sweep sweep.yaml")
    # a script, too, trains the numbers of this folder
    assert 'train_file(__file__, "experiment=default"' in texts["lines.py"]


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
        ([], "the following arguments are required: FOLDER"),
        (["a", "b"], "unrecognized arguments: b"),
        (["mine", "--like", "moe"], "unrecognized arguments: --like"),
        (["it's"], "letters, digits"),
        (["a b"], "letters, digits"),
        (["-"], "letters, digits"),
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
    assert main(["new", *words]) == 2
    shown = capsys.readouterr().err
    assert said in shown
    assert "Traceback" not in shown
    assert sorted(Path().rglob("*")) == before


# ---- `python mine.py` trains the classes of that file --------------------------------


RECIPE = Path(__file__).parents[2] / "recipes" / "lines" / "lines.py"


def python(path: Path, *words: str) -> int | str | None:
    """Run `python path words` in this process; gives its status."""
    sys.path.insert(0, str(path.parent))
    sys.argv = [str(path), *words]
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(path), run_name="__main__")
    return end.value.code


@pytest.mark.parametrize(
    ("folder", "name"), [("src/deep", "src.deep.mine"), ("../other", "mine")]
)
def test_a_copy_of_a_recipe_trains_itself(
    folder: str, name: str, tmp_path: Path
) -> None:
    path = (tmp_path / folder / "mine.py").resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(RECIPE.read_text().replace("width: int = 128", "width: int = 3"))
    assert python(path, *FEW, "~model.width") == 0
    (run,) = run_dirs(tmp_path)
    config = (run / "config.yaml").read_text()
    assert f"_target_: {name}.Classifier" in config
    assert "trainkit.recipes" not in config  # the control: what it was copied from


def test_words_replace_those_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(RECIPE.read_text())
    small = ["debug=default", "data.batch_size=8", "data.num_train=84"]
    small += ["trainer.detect_anomaly=false", "report=false"]
    assert python(path, "experiment=lines", *small) == 0
    (run,) = run_dirs(tmp_path)
    assert "_target_: mine.Classifier" in (run / "config.yaml").read_text()
    assert python(path, "ckpt_path=last", "trainer.max_steps=8") == 0
    assert run_dirs(tmp_path) == [run]


def test_another_rank_gets_the_whole_command(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(RECIPE.read_text())
    assert python(path, "train", "experiment=nothing") == 2
    assert python(path, "train", "experiment=lines", "--cfg=job") == 0
