"""`python mine.py` trains the classes of that file."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from tests.cli.training import run_dirs
from trainkit.config import targets

RECIPE = Path(__file__).parents[2] / "recipes" / "lines" / "lines.py"
WORDS = [
    "trainer.max_epochs=1",
    "trainer.log_every_n_steps=1",
    "data.num_train=20",
    "data.num_val=4",
    "data.batch_size=4",
    "report=false",
]


@pytest.fixture(autouse=True)
def as_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "_allowed", set(targets._allowed))
    monkeypatch.delitem(sys.modules, "mine", raising=False)


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
    assert python(path, *WORDS, "~model.width") == 0
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


def test_conf_beside_the_file_is_found_from_any_folder(tmp_path: Path) -> None:
    path = tmp_path / "project" / "mine.py"
    (path.parent / "conf" / "experiment").mkdir(parents=True)
    path.write_text(RECIPE.read_text().replace('"experiment=lines", ', ""))
    own = path.parent / "conf" / "experiment" / "default.yaml"
    own.write_text("# @package _global_\ndefaults: [lines]\nname: of_its_conf\n")
    assert python(path, *WORDS) == 0
    (run,) = run_dirs(tmp_path)
    assert run.parent == tmp_path / "outputs" / "of_its_conf"
    (tmp_path / "other").mkdir()  # the control: a place that is given
    assert python(path, "-cd", "other", "experiment=lines", "--cfg=job") == 0
    assert python(path, "-cd", "other", "experiment=default", "--cfg=job") == 2
