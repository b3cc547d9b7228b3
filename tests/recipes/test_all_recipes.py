"""What a user finds in every recipe: its folder, its debug size, its data and noise."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from recipes import (
    code_lm,
    contrastive,
    digits_bn,
    gan,
    lines,
    moe,
    multi_term,
    segmentation,
)
from tests.cli.training import summary_of
from tests.helpers import NAIVE, trainer
from tests.recipes.small import metrics_of, small
from trainkit.cli.composition import Composition
from trainkit.config.check import check_all

HERE = Path(__file__).parents[2] / "recipes"
RECIPES = sorted(path.parent.name for path in HERE.glob("*/__init__.py"))
COMMAND = re.compile(r"^\s*trainkit train .*$", re.MULTILINE)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_one_file_with_a_readme_and_a_picture(name: str) -> None:
    readme = (HERE / name / "README.md").read_text()
    source = (HERE / name / f"{name}.py").read_text()
    assert f"trainkit train experiment={name}\n" in re.sub(r" +#.*", "", readme)
    assert COMMAND.search(source)
    called = f'\n    train_file(__file__, "experiment={name}"'
    assert called in source.replace("(\n        ", "(")
    for picture in re.findall(r"!\[.+\]\((.+)\)", readme):
        assert 10_000 < (HERE / name / picture).stat().st_size < 150_000
    assert f"{name}.png" in readme
    assert "|---" in readme, "what was measured"
    imports = re.findall(r"^ *from (trainkit\S*) import", source, re.MULTILINE)
    assert set(imports) <= {"trainkit", "trainkit.recipes", "trainkit.cli.script"}


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


@pytest.mark.filterwarnings("ignore:proof. a window:UserWarning")  # digits_bn's own
@pytest.mark.parametrize(
    ("words", "steps", "metric", "above", "below"),
    [
        ("code_lm", 4, "val/loss", 0, 6),
        ("completions trainer.max_steps=2", 2, "val/loss", 0, 6),
        ("packed_lm", 4, "val/loss", 0, 6),
        ("ragged_regression", 4, "val/loss", 0, float("inf")),
        ("digits_bn batchnorm=momentum", 4, "val/accuracy", -0.01, 1.01),
        ("gan", 4, "val/distance", 0, 1),
    ],
)
def test_the_debug_size_trains(
    words: str,
    steps: int,
    metric: str,
    above: float,
    below: float,
    run_train: Callable[..., Path],
) -> None:
    name, *more = words.split()
    run = run_train(*small(name), *more)
    summary = summary_of(run)
    assert (summary["status"], summary["steps"]) == ("finished", steps)
    assert above < metrics_of(run)[metric] < below
    if name == "code_lm":
        assert summary["micro_batching"]["tokens"] == 1024
    if name == "completions":
        assert summary["plain_accumulation"]["mean"] > NAIVE


def image_of(row: Any) -> tuple[float, ...]:
    image = row["image"] if isinstance(row, dict) else row[0]
    return tuple(image.flatten().tolist())


CODE = code_lm.Functions(num_train=300, num_val=100, max_length=10_000)
BLOCKS = moe.Blocks(num_train=100, num_val=10)
SHAPES = segmentation.Shapes(num_train=40, num_val=20, side=32)
DATA: dict[str, tuple[Any, Any, int, Any, int]] = {
    # Python's library itself has some functions twice, word for word.
    "code_lm": (CODE, 300, 100, lambda row: tuple(row.tolist()), 3),
    "contrastive": (contrastive.Digits(), 1024, 512, image_of, 0),
    "digits_bn": (digits_bn.Digits(), 1206, 591, image_of, 0),
    "moe": (BLOCKS, 100, 10, lambda row: tuple(row.tolist()), 0),
    "multi_term": (multi_term.Names(), None, 400, lambda row: row[1], 0),
    "segmentation": (SHAPES, 40, 20, image_of, 0),
}


@pytest.mark.parametrize("name", DATA)
def test_training_and_validation_share_no_row(name: str) -> None:
    data, num_train, num_val, content, most_shared = DATA[name]
    data.setup("fit")
    assert num_train in (None, len(data.train_rows))  # as many names as Python has
    assert len(data.val_rows) == num_val
    train, val = (set(map(content, rows)) for rows in (data.train_rows, data.val_rows))
    assert len(train) > 0.9 * len(data.train_rows)
    assert len(train & val) <= most_shared


@pytest.mark.parametrize(
    ("data", "collate"),
    [(gan.Digits, default_collate), (multi_term.Names, multi_term.multi_term.collate)],
    ids=["gan", "multi_term"],
)
def test_noise_is_that_of_the_row_wherever_it_is_read(data: Any, collate: Any) -> None:
    """With noise of the batch, two ranks would train something else than one."""
    made = data(latent=4)
    made.setup("fit")
    whole, rest = (collate(made.train_rows[start:6]) for start in (0, 4))
    drawn = made.with_noise(whole, epoch=1)["noise"]
    assert torch.equal(drawn[4:], made.with_noise(rest, epoch=1)["noise"])
    assert not torch.equal(drawn, made.with_noise(whole, epoch=2)["noise"])
    assert len(drawn.unique()) == drawn.numel()


def test_what_a_new_project_begins_with_predicts() -> None:
    """Lightning makes another loader of one for predictions."""
    data = lines.Lines(batch_size=4, num_train=8, num_val=6)
    found: Any = trainer().predict(lines.Classifier(width=4), data)
    assert [len(each["package"]) for each in found] == [4, 2]
