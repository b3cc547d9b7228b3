"""What is installed: sdist, wheel and editable, used from another folder."""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[1]
SOURCES = ("trainkit", "conf", "recipes", "pyproject.toml", "README.md", "LICENSE")
PLACES = {
    "trainkit": "trainkit",
    "conf": "trainkit/conf",
    "recipes": "trainkit/recipes",
}
"""Folders of the repository, and where they stand once installed."""

SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())

# ---- without building ----------------------------------------------------------------


def test_a_package_may_be_as_old_as_lightning_allows() -> None:
    """Others that build on Lightning ask for jsonargparse up to 4.41, or below 4.47."""
    wanted = [Requirement(each) for each in SETTINGS["project"]["dependencies"]]
    (ours,) = [each for each in wanted if each.name == "jsonargparse"]
    extras = map(Requirement, metadata.requires("lightning") or [])
    theirs = [each for each in extras if each.name == "jsonargparse"]
    lowest = {s.version for e in theirs for s in e.specifier if s.operator == ">="}
    assert lowest
    assert all(ours.specifier.contains(version) for version in lowest)
    assert ours.specifier.contains("4.41.0")
    assert not any(s.operator.startswith("<") for s in ours.specifier)


def test_messages_and_pages_name_the_distribution() -> None:
    """On PyPI `trainkit` is another project: its extras would not be found."""
    name, extras = SETTINGS["project"]["name"], "optional-dependencies"
    named = re.compile(r"([\w-]*trainkit)\[([a-z,]+)\]")
    assert named.search("pip install 'trainkit[recipes]'")  # the control
    kinds = ("*.py", "*.md", "*.toml", "*.yaml", "Makefile", "Dockerfile")
    places = [ROOT, *(ROOT / each for each in ("trainkit", "conf", "recipes"))]
    found = [
        (path.name, *match.groups())
        for place in [*places, ROOT / "docker"]
        for kind in kinds
        for path in (place.glob(kind) if place == ROOT else place.rglob(kind))
        for match in named.finditer(path.read_text())
    ]
    assert len({file for file, *_ in found}) >= 5
    for file, distribution, asked in found:
        assert distribution == name, file
        assert set(asked.split(",")) <= SETTINGS["project"][extras].keys(), file


def test_the_demo_installs_no_extra() -> None:
    def steps(name: str) -> str:  # within a `make test`, make also says its folder
        words = ["make", "--no-print-directory", "-nB", name]
        return subprocess.check_output(words, cwd=ROOT, text=True)

    assert "--editable .\n" in steps("demo")
    assert "[" not in steps("demo")
    assert "--editable '.[dev]'" in steps("test")  # the control


# ---- building ------------------------------------------------------------------------


@dataclass(frozen=True)
class Built:
    source: Path
    sdist: Path
    wheel: Path
    wheel_of_sdist: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Of a copy, named as a clone is: building leaves files in the sources."""
    where = tmp_path_factory.mktemp("built")
    source = where / "trainkit"
    source.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            leave = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(ROOT / name, source / name, ignore=leave)
        else:
            shutil.copy(ROOT / name, source)
    said = build("--sdist", source, where / "sdist")
    (sdist,) = (where / "sdist").iterdir()
    shutil.unpack_archive(sdist, where / "unpacked", filter="data")
    (unpacked,) = (where / "unpacked").iterdir()
    said += build("--wheel", unpacked, where / "wheel_of_sdist")
    said += build("--wheel", source, where / "wheel")
    assert "would be ignored" not in said
    (wheel_of_sdist,) = (where / "wheel_of_sdist").iterdir()
    (wheel,) = (where / "wheel").iterdir()
    return Built(source, sdist, wheel, wheel_of_sdist)


def build(what: str, source: Path, where: Path) -> str:
    command = [sys.executable, "-m", "build", "--no-isolation", what, "-o", str(where)]
    return done([*command, str(source)], cwd=source.parent)


def done(command: list[str], *, cwd: Path, **environment: str) -> str:
    """What a command says, if it ends well."""
    ended = subprocess.run(
        command,
        cwd=cwd,
        env={**_plain_environment(cwd), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


def _plain_environment(home: Path) -> dict[str, str]:
    """A new user's: nothing of this process's W&B, Python path or allowed targets."""
    leave = ("WANDB_", "PYTHON", "TRAINKIT_", "PYTEST_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(leave)}
    return {**kept, "HOME": str(home), "OMP_NUM_THREADS": "1"}


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as file:
        return {
            name: file.read(name)
            for name in file.namelist()
            if ".dist-info/" not in name
        }


@pytest.mark.environments
def test_the_wheel_holds_every_file(built: Built) -> None:
    plugin = "trainkit/config/plugin/"
    expected = {"hydra_plugins/trainkit_searchpath/__init__.py"}
    for place, installed in PLACES.items():
        for path in (built.source / place).rglob("*"):
            name = f"{installed}/{path.relative_to(built.source / place)}"
            kinds = (".py", ".pyi", ".yaml", ".typed", ".css", ".sh")
            is_held = path.suffix in kinds
            is_held |= "template" in path.parts and path.is_file()
            if is_held and plugin not in name:
                expected.add(name)
    assert {"trainkit/conf/train.yaml", "trainkit/py.typed"} < expected
    assert "trainkit/cli/new/template/README.md" in expected
    assert "trainkit/pages/page.css" in expected
    assert set(contents(built.wheel_of_sdist)) == expected


@pytest.mark.environments
def test_the_sdist_makes_the_same_wheel(built: Built) -> None:
    assert contents(built.wheel_of_sdist) == contents(built.wheel)


@pytest.mark.environments
def test_the_metadata_are_fit_to_be_published(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as file:
        (name,) = (n for n in file.namelist() if n.endswith("/METADATA"))
        told = email.message_from_bytes(file.read(name))
    assert told["Name"] == "lightning-trainkit"
    assert told["Description-Content-Type"] == "text/markdown"
    for field in ("Author", "Keywords", "License-Expression", "Summary", "Version"):
        assert told[field], field
    assert told["Authors"] is None  # the control: no such field
    assert told.get_payload() == (ROOT / "README.md").read_text()


# ---- installing ----------------------------------------------------------------------


@dataclass(frozen=True)
class Installed:
    """A fresh environment with trainkit, and an empty folder elsewhere."""

    bin: Path
    folder: Path

    def run(self, *words: str, **environment: str) -> str:
        command = [str(self.bin / words[0]), *words[1:]]
        return done(command, cwd=self.folder, **environment)


@pytest.fixture(scope="module", params=["wheel_of_sdist", "sdist", "editable"])
def installed(
    request: pytest.FixtureRequest,
    built: Built,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Installed]:
    where = tmp_path_factory.mktemp(request.param)
    venv.create(where / "venv", symlinks=True)
    _lend_dependencies(where / "venv", where / "dependencies")
    folder = where / "folder"
    folder.mkdir()
    words = ["-e", str(built.source)]
    if request.param != "editable":
        words = [str(getattr(built, request.param))]
    done(
        [
            *(sys.executable, "-m", "pip", "--python", str(where / "venv/bin/python")),
            *("install", "--quiet", "--disable-pip-version-check", "--no-index"),
            *("--no-deps", "--no-build-isolation", *words),
        ],
        cwd=folder,
    )
    yield Installed(where / "venv" / "bin", folder)
    shutil.rmtree(where)


def _lend_dependencies(environment: Path, lent: Path) -> None:
    """Give it what is installed here, but for trainkit, without copying."""
    lent.mkdir()
    for folder in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for path in Path(folder).iterdir():
            _link(path, lent / path.name)
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "lent.pth").write_text(f"{lent}\n")


def _link(path: Path, place: Path) -> None:
    if "trainkit" in path.name or path.suffix == ".pth":
        return
    if path.name.startswith("transformers"):  # not among those of trainkit
        return
    if path.name == "hydra_plugins":  # ours is among others'
        place.mkdir()
        for inner in path.iterdir():
            _link(inner, place / inner.name)
    elif not place.exists():
        place.symlink_to(path)


SMALL = [
    "debug=default", "data.num_train=32", "data.num_val=4", "data.max_length=64",
    "data.batch_size=2", "trainer.limit_val_batches=1",
]  # fmt: skip

MINE = '''
import torch
from lightning.pytorch import LightningModule
from trainkit import AccumulationStrategy


class Rows(AccumulationStrategy):
    """A strategy of a user's own."""

    def weight(self, batch):
        return len(batch["ids"])


class Net(LightningModule):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.byte = torch.nn.Embedding(256, width)
        self.head = torch.nn.Linear(width, 256)

    def training_step(self, batch, batch_idx):
        logits = self.head(self.byte(batch["ids"])).flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, batch["labels"].flatten())

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.training_step(batch, batch_idx))
'''

APP = """
import hydra
import trainkit
from trainkit.config import instantiate


@hydra.main(version_base="1.3", config_path="conf", config_name="app")
def main(config):
    print("made:", instantiate(config.accumulation), config.lr)
    print("from:", trainkit.__file__)


if __name__ == "__main__":
    main()
"""


def written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.environments
def test_a_hydra_app_of_ones_own_has_the_groups(installed: Installed) -> None:
    written(
        installed.folder / "conf" / "app.yaml",
        "defaults:\n  - /accumulation: per_token\n  - _self_\nlr: 0.5\n",
    )
    written(installed.folder / "app.py", APP)
    said = installed.run("python", "app.py", "-m", "accumulation=per_token,per_sample")
    made = [line for line in said.splitlines() if line.startswith("made:")]
    assert made[0].startswith("made: PerToken(labels='labels'")
    assert made[1].startswith("made: PerSample(")
    assert made[1].endswith(" 0.5")
    assert f"from: {ROOT}" not in said  # the control: not these sources
    shown = installed.run("python", "app.py", "--cfg", "job")
    assert "_target_: trainkit.PerToken" in shown


# The wheel is that of the sdist, byte for byte (above): two are enough to train from.
train_from = pytest.mark.parametrize("installed", ["sdist", "editable"], indirect=True)


@pytest.mark.environments
@train_from
def test_train_with_a_module_and_a_strategy_in_the_current_folder(
    installed: Installed,
) -> None:
    written(installed.folder / "mine.py", MINE)
    groups = installed.folder / "my conf"
    written(groups / "accumulation" / "rows.yaml", "_target_: mine.Rows\n")
    written(groups / "model" / "mine.yaml", "_target_: mine.Net\nwidth: 3\n")
    asked = ["accumulation=rows", "model=mine", "--config-dir", "my conf", *SMALL]
    said = installed.run("trainkit", "train", "experiment=demo", *asked)
    assert "weighed by Rows" in said
    assert "finished after 4 optimizer steps" in said
    (run,) = installed.folder.glob("outputs/code_lm/*")
    assert {path.name for path in run.iterdir()} >= {
        "checkpoints", "config.yaml", "metrics.csv", "overrides.yaml", "summary.json",
    }  # fmt: skip


@pytest.mark.environments
@train_from
def test_the_other_doors(installed: Installed) -> None:
    written(installed.folder / "mine.py", MINE)
    plan = ["--target", "512", "--world-size", "4", "--max-micro-batch", "24"]
    assert "512" in installed.run("trainkit", "plan", *plan)
    shown = installed.run(
        "trainkit", "fit", "--print_config", "--model=mine.Net",
        "--data=trainkit.recipes.code_lm.Functions", "--accumulation=mine.Rows",
    )  # fmt: skip
    assert "class_path: mine.Rows" in shown
    assert "_target_: trainkit.PerToken" in installed.run(
        "trainkit", "train", "--cfg", "job"
    )


@pytest.mark.environments
@pytest.mark.parametrize("installed", ["editable"], indirect=True)
def test_the_folder_around_a_clone_does_not_hide_it(
    installed: Installed, built: Built
) -> None:
    python, around = str(installed.bin / "python"), built.source.parent
    shown = "import trainkit; print(trainkit.__file__)"
    said = done([python, "-c", f"{shown}; import trainkit.recipes"], cwd=around)
    assert said.strip() == str(built.source / "trainkit" / "__init__.py")
    clone = str(built.source)
    forget = f"import sys; sys.path = [p for p in sys.path if {clone!r} not in p]; "
    assert done([python, "-c", forget + shown], cwd=around).strip() == "None"
    # What is no namespace package goes first, as it does with any installed package.
    mine = written(installed.folder / "around" / "trainkit" / "__init__.py", "")
    said = done([python, "-c", shown], cwd=mine.parents[1])
    assert said.strip() == str(mine)
