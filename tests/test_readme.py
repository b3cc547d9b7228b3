"""What README and the other pages say is what happens."""

from __future__ import annotations

import copy
import re
import signal
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

from tests.helpers import deviation, loader, quiet_lightning, ragged_sequences, trainer
from tests.startup import ended
from trainkit import AccumulationCallback, PerToken

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
    done = ended([sys.executable, "program.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "trainkit | proof: exact on" in done.stdout


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
