"""`trainkit new`: make the folder of a training of one's own, from a recipe."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from trainkit.cli.new.recipe import Recipe
from trainkit.errors import TrainkitError, did_you_mean
from trainkit.lit.callback.table import show

DEFAULT = "lines"
"""The recipe that is copied unless --like names another."""

HELP = """\
usage: trainkit new FOLDER [--like RECIPE]

Make a folder with a module, its data and their configuration, copied from a recipe.
There, `trainkit train` trains it at once. Change the files one by one into your own.

recipes:
{recipes}

example:
  trainkit new my_project --like {default} && cd my_project && trainkit train
"""

README = """\
# {project}

{title}

```bash
trainkit train                        # ends with a report in outputs/
trainkit {evaluate} outputs/{project}
trainkit sweep sweep.yaml --offline   # several learning rates, and a table of them
```

- `{name}.py` has the module and the data. Any other LightningModule and
  LightningDataModule can take their place.
- `conf/experiment/default.yaml` has the numbers of the training. The command line takes
  them too: `trainkit train trainer.max_epochs=1`.
- `conf/model` and `conf/data` have a file for each choice, as in
  `trainkit train model={model}`.
- `python -m pytest` measures whether windows are the big batch, as
  `trainkit check train` does.

This folder began as trainkit's recipe {name}: `trainkit new --like {name}`.
"""

TEST = '''\
"""A window of this training has the gradient of one big batch."""

from pathlib import Path

import pytest

from trainkit.cli.main import main


def test_a_window_is_the_big_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    assert main(["check", "train"{words}]) == 0  # it prints why, if not
'''

SWEEP = """\
# trainkit sweep sweep.yaml --offline     (pip install 'lightning-trainkit[sweeps]')
# Without --offline: on the server of W&B that you are logged in to.
name: learning_rate
project: {project}
method: grid
metric:
  name: {metric}
  goal: {mode}imize
parameters:
  {rate}:
    values: [{values}]
command:
  - ${{env}}
  - trainkit
  - train
  - logger=wandb
  - ${{args_no_hyphens}}
"""

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)


def main(argv: list[str]) -> int:
    """Make the folder, and return the exit status."""
    if not argv or {"-h", "--help"} & set(argv):
        width = max(map(len, Recipe.names()))
        rows = [f"  {n:<{width}}  {Recipe(n).title}" for n in Recipe.names()]
        print(HELP.format(recipes="\n".join(rows), default=DEFAULT), end="")
        return 0 if argv else 2
    folder, recipe = _taken_apart(argv)
    files = contents(recipe, folder.resolve().name)
    try:
        for path, text in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
    except OSError as error:
        raise TrainkitError(
            f"trainkit new: {folder} cannot be written: {error}. Choose a folder that "
            f"can be made."
        ) from error
    shown = sorted({path.partition("/")[0] + "/" * ("/" in path) for path in files})
    rows = [("new", f"{folder}, like the recipe {recipe.name}: {', '.join(shown)}")]
    missing = recipe.missing_packages()
    if missing:
        extra = "pip install 'lightning-trainkit[recipes]'"
        rows.append(("needs", f"{', '.join(missing)}: {extra}"))
    where = "" if folder == Path() else f"cd {shlex.quote(str(folder))} && "
    show([*rows, ("next", f"{where}trainkit train")])
    return 0


def contents(recipe: Recipe, project: str) -> dict[str, str]:
    """The text of each file of a new folder.

    Args:
        recipe: what is copied.
        project: the name of the folder, and of the folder of its runs.
    """
    configuration = recipe.configuration(project)
    default = configuration["conf/experiment/default.yaml"]
    values = dict(re.findall(r"^(metric|mode): (\S+)", default, re.M))
    model = next(path for path in configuration if path.startswith("conf/model/"))
    words = {
        "project": project,
        "name": recipe.name,
        "title": recipe.title,
        "model": Path(model).stem,
        "evaluate": "test" if recipe.has("test_step") else "validate",
    }
    rate = recipe.learning_rate
    # What keeps windows from being the big batch is BatchNorm itself.
    has_batch_norm = "nn.BatchNorm" in recipe.source
    return {
        **recipe.modules(),
        **configuration,
        f"test_{recipe.name}.py": TEST.format(
            words=', "batchnorm=group_norm"' if has_batch_norm else ""
        ),
        "sweep.yaml": SWEEP.format(
            project=project,
            metric=values.get("metric", "val/loss"),
            mode=values.get("mode", "min"),
            rate="model.lr" if "/optimizer: none" in default else "optimizer.lr",
            values=", ".join(f"{rate * factor:g}" for factor in (0.1, 0.3, 1, 3)),
        ),
        "README.md": README.format(**words),
        ".gitignore": "outputs/\nsweeps/\n__pycache__/\n",
    }


def _taken_apart(argv: Sequence[str]) -> tuple[Path, Recipe]:
    words, folders, like = list(argv), [], DEFAULT
    while words:
        name, has_value, value = words.pop(0).partition("=")
        if name == "--like" and (has_value or words):
            like = value if has_value else words.pop(0)
        elif name.startswith("-"):
            raise TrainkitError(
                f"trainkit new {name}: must be --like RECIPE. trainkit new --help "
                f"lists the recipes."
            )
        else:
            folders.append(name + has_value + value)
    if like not in Recipe.names():
        raise TrainkitError(
            f"trainkit new --like: must be one of {', '.join(Recipe.names())}, "
            f"received {like!r}.{did_you_mean(like, Recipe.names())}"
        )
    if len(folders) != 1:
        raise TrainkitError(
            f"trainkit new: must be followed by the name of one folder, received "
            f"{' '.join(folders) or 'none'}. For example: trainkit new my_project"
        )
    return _checked(Path(folders[0])), Recipe(like)


def _checked(folder: Path) -> Path:
    name = folder.resolve().name
    if not _NAME.fullmatch(name):
        raise TrainkitError(
            f"trainkit new: the name must consist of letters, digits, '_', '-' and "
            f"'.', since folders of runs take it, received {name!r}."
        )
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise TrainkitError(
            f"trainkit new: must be a folder that is new or empty, received {folder}, "
            f"which has files. Choose another name."
        )
    return folder
