"""What README and the other pages say is what happens."""

from __future__ import annotations

import copy
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

from tests.helpers import deviation, loader, quiet_lightning, ragged_sequences, trainer
from tests.startup import forked
from trainkit import AccumulationCallback, PerToken
from trainkit.cli.composition import Composition
from trainkit.cli.main import main

ROOT = Path(__file__).parents[1]
CORE, LIT, DATA, CLI = (
    f"trainkit/{floor}/README.md" for floor in ("core", "lit", "data", "cli")
)
PAGES = {
    name: (ROOT / name).read_text()
    for name in ("README.md", CORE, LIT, DATA, CLI, "CONTRIBUTING.md")
}
README = PAGES["README.md"]


def blocks(name: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGES[name], flags=re.DOTALL)


PYTHON_BLOCKS = [
    pytest.param(block, id=f"{name}-{number}")
    for name in PAGES
    for number, block in enumerate(blocks(name, "python"))
]


def block_with(name: str, words: str) -> str:
    return next(block for block in blocks(name, "python") if words in block)


def run(block: str) -> dict[str, Any]:
    namespace: dict[str, Any] = {}
    exec(compile(block, "README.md", "exec"), namespace)
    return namespace


@pytest.fixture
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some blocks train, and Lightning writes checkpoints."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("in_a_folder")
@pytest.mark.filterwarnings("ignore:Starting from v1.9.0:UserWarning")
@pytest.mark.filterwarnings("ignore:The number of training batches:UserWarning")
@pytest.mark.parametrize("block", PYTHON_BLOCKS)
def test_python_blocks_run(block: str) -> None:
    assert run(block)


@pytest.mark.parametrize("number", [0, 1])
def test_the_first_programs_are_proved(number: int, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(blocks("README.md", "python")[number])
    printed = subprocess.check_output(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env={**os.environ, **forked()},
        text=True,
    )
    assert "trainkit | proof: exact on" in printed


@pytest.mark.parametrize("name", ["README.md", CORE, LIT, DATA])
def test_a_page_on_code_has_examples(name: str) -> None:
    assert blocks(name, "python")


@pytest.mark.parametrize(("name", "most"), [("README.md", 160), (LIT, 350)])
def test_a_page_is_short(name: str, most: int) -> None:
    assert len(PAGES[name].splitlines()) <= most


@pytest.mark.usefixtures("in_a_folder")
@pytest.mark.filterwarnings("ignore:Starting from v1.9.0:UserWarning")
@pytest.mark.filterwarnings("ignore:The number of training batches:UserWarning")
def test_first_block_equals_the_big_batch() -> None:
    names = run(blocks("README.md", "python")[0])

    def fit(size: int, accumulate: int, *callbacks: pl.Callback) -> Any:
        torch.manual_seed(0)
        module = names["MyModule"]().double()
        fit = trainer(accumulate, callbacks=list(callbacks))
        with quiet_lightning():
            fit.fit(module, loader(ragged_sequences(38), size))
        return module

    torch.manual_seed(0)
    start = names["MyModule"]().double()
    big = fit(16, 1)
    assert deviation(fit(4, 4), big, start) < 1e-10


def test_plain_loop_equals_the_big_batch() -> None:
    block = block_with(CORE, "Accumulator(PerSample()")
    seeded = block.replace("import torch\n", "import torch\ntorch.manual_seed(3)\n", 1)
    trained = run(seeded)["model"]
    torch.manual_seed(3)
    start = torch.nn.Linear(4, 1)
    big = copy.deepcopy(start)
    optimizer = torch.optim.SGD(big.parameters(), lr=0.1)
    for x in torch.randn(3, 10, 4):
        optimizer.zero_grad()
        big(x).square().mean().backward()
        optimizer.step()
    assert deviation(trained, big, start) < 1e-5


class Small(pl.LightningModule):
    """One BatchNorm, and the rate of the page."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Stop(pl.Callback):
    """After a window, so that the Trainer still means to run all epochs."""

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        trainer.should_stop = batch_idx == 1


@pytest.mark.filterwarnings("ignore:Starting from v1.9.0:UserWarning")
def test_table_before_training_is_the_one_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    block = block_with(LIT, "LRScaling(")
    callbacks = [
        c for c in run(block)["trainer"].callbacks if "trainkit" in type(c).__module__
    ]
    section = PAGES[LIT].partition("## The effective batch")[2]
    shown = re.findall(r"^trainkit \| .*$", section, flags=re.MULTILINE)
    data = loader(list(torch.randn(8 * 194 + 3, 2)), 8, collate=torch.stack)
    with quiet_lightning(), pytest.warns(UserWarning, match=r"BatchNorm: net\.1"):
        trainer(max_epochs=20, callbacks=[*callbacks, Stop()]).fit(Small(), data)
    lines = [x for x in capsys.readouterr().out.splitlines() if "|" in x]
    proof = "trainkit | proof: not measured"  # `Stop` ends its rehearsal as well
    assert [x for x in lines if not x.startswith(proof)] == shown


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # jsonargparse's, of it
def test_a_lightning_cli_takes_the_callback_in_its_yaml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["program"])
    (block,) = re.findall(
        r"^  ```yaml\n(.*?)^  ```", PAGES[CLI], re.DOTALL | re.MULTILINE
    )
    config = tmp_path / "config.yaml"
    config.write_text(textwrap.dedent(block))
    args = ["--config", str(config), "--seed_everything=1"]
    cli = LightningCLI(BoringModel, run=False, args=args)
    made: Any = cli.trainer
    (found,) = (c for c in made.callbacks if isinstance(c, AccumulationCallback))
    assert made.accumulate_grad_batches == 8
    assert found.strategies[""] == PerToken(ignore_index=-1)


@pytest.mark.filterwarnings("ignore:Starting from v1.9.0:UserWarning")
@pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available")
def test_script_that_is_interrupted_resumes_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside the second window, which both the uninterrupted run and it have whole."""
    train = run(block_with(LIT, "ExactResume()]"))["train"]
    rows = torch.randn(8 * 51, 2).split(1)

    class Dropping(Small):
        def __init__(self, stops: bool) -> None:
            super().__init__()
            self.net.append(torch.nn.Dropout(0.5))
            self.stops = stops

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.stops and batch_idx == 5:
                signal.raise_signal(signal.SIGTERM)
            loss = super().training_step(batch.squeeze(1), batch_idx)
            self.log("loss", loss, on_step=True, on_epoch=True, batch_size=len(batch))
            return loss

    def trained(folder: str, *, stops: bool = False) -> Any:
        (tmp_path / folder).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / folder)
        torch.manual_seed(0)
        module = Dropping(stops)
        with quiet_lightning(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="BatchNorm: ")
            train(module, rows)
        return module.state_dict(), Path("runs/first/metrics.csv").read_text()

    whole, whole_rows = trained("whole")
    with pytest.raises(SystemExit):
        trained("stopped", stops=True)
    found, found_rows = trained("stopped")
    assert found_rows == whole_rows
    assert all(torch.equal(found[name], value) for name, value in whole.items())


def test_loss_of_several_terms_equals_the_big_batch() -> None:
    block = block_with(CORE, "Accumulator({")
    seeded = block.replace("import torch\n", "import torch\ntorch.manual_seed(3)\n", 1)
    names = run(seeded)
    torch.manual_seed(3)
    start = torch.nn.Linear(4, 5)
    big = copy.deepcopy(start)
    logits, labels = big(names["batch"]["x"]), names["batch"]["labels"]
    ce = torch.nn.functional.cross_entropy(logits, labels)
    (ce + 0.1 * logits.square().sum(1).mean()).backward()
    torch.optim.SGD(big.parameters(), lr=0.1).step()
    assert deviation(names["model"], big, start) < 1e-5


@pytest.mark.parametrize("name", PAGES)
def test_commands_are_those_of_the_makefile(name: str) -> None:
    named = re.findall(r"(?:^|`)make (\w+)", PAGES[name], flags=re.MULTILINE)
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(named) <= set(targets)


def test_front_page_begins_with_two_commands() -> None:
    named = re.findall(r"^make (\w+)", README, flags=re.MULTILINE)
    assert named == ["demo", "test"]


@pytest.mark.environments  # it takes half a minute
def test_the_demo_ends_as_the_front_page_says(tmp_path: Path) -> None:
    """But for its speed and its folder; rounding differs from machine to machine."""
    command = [sys.executable, "-m", "trainkit", "train"]
    printed = subprocess.check_output(command, cwd=tmp_path, text=True)
    (said,) = re.findall(r"```\n(trainkit \| training: .*?)```", README, re.DOTALL)
    number = r"[\d,]*\.?\d+"
    lines = {re.sub(number, "#", line): line for line in printed.splitlines()}
    seen = "\n".join(lines[re.sub(number, "#", line)] for line in said.splitlines())
    values, expected = (
        [float(each.replace(",", "")) for each in re.findall(number, text)]
        for text in (seen, said)
    )
    assert len(values) > 7
    assert values == pytest.approx(expected, rel=0.1)


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


def test_there_are_commands_of_every_kind() -> None:
    assert {words[1] for words in COMMANDS} == {
        *("new", "train", "fit", "sweep", "plan", "check", "lengths"),
        *("validate", "test", "predict"),
    }


TRAININGS = [
    list(words)
    for words in dict.fromkeys(map(tuple, COMMANDS))
    if words[1] == "train" and "ckpt_path=last" not in words
]


def first_value(word: str) -> str:
    """An override with the first of its values, or the start of its interval."""
    return re.sub(r"tag\(log,|interval\(", "", word).split(",")[0]


@pytest.mark.parametrize("words", TRAININGS, ids=" ".join)
def test_every_training_it_names_composes(words: list[str], in_a_folder: None) -> None:
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


def test_every_sweep_it_names_is_there() -> None:
    files = [words[2] for words in COMMANDS if words[1] == "sweep"]
    assert files
    assert all((ROOT / file).exists() for file in files)


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
