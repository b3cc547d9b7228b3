"""A model and data of one's own, in the current folder, with nothing of the demo."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.cli import ones_own
from tests.cli.training import own_option, summary_of, the_run, train
from trainkit.cli.composition import Composition
from trainkit.cli.main import main
from trainkit.cli.words import completed
from trainkit.config.conf import conf_dir

MODULE = """

class Unoptimized(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def training_step(self, batch, batch_idx):
        return self.net.training_step(batch, batch_idx)

    validation_step = Bare.validation_step


class WithData(Unoptimized):
    def train_dataloader(self):
        return loader(0, 20)

    val_dataloader = train_dataloader


class Broken(Net):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * float("nan")


class Empty(Data):
    def train_dataloader(self):
        return DataLoader([], 4)


def number():
    return 3


def module():
    return Net()
"""

MINE = ["model._target_=ones_own.Net", "data._target_=ones_own.Data"]
EPOCHS = ["trainer.max_epochs=2", "trainer.log_every_n_steps=1", "report=false"]


@pytest.fixture(autouse=True)
def _in_a_folder_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    monkeypatch.delenv("TRAINKIT_ALLOW", raising=False)
    text = Path(ones_own.__file__).read_text()
    (tmp_path / "ones_own.py").write_text(text + MODULE)
    yield
    sys.modules.pop("ones_own", None)


def own(*words: str) -> int:
    return train(*words, small=EPOCHS)


def test_nothing_of_the_demo_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert own(*MINE) == 0
    assert "| clipping" not in capsys.readouterr().out
    run = the_run(tmp_path)
    assert run.parent == tmp_path / "outputs" / "Net"
    assert summary_of(run)["steps"] == 10  # two epochs of five batches
    assert (run / "checkpoints" / "best.ckpt").exists()
    assert (run / "metrics.csv").read_text().count("val/loss") == 1
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["trainer"].get("gradient_clip_val") is None
    assert config["trainer"].get("accumulate_grad_batches", 1) == 1
    assert not any(config[n] for n in ("optimizer", "scheduler", "accumulation"))


def test_nothing_chosen_is_the_demo() -> None:
    assert completed(["optimizer.lr=0.1"]) == ["optimizer.lr=0.1", "experiment=demo"]
    for word in ("model=mine", "data=mine", "experiment=gan", *MINE):
        assert completed([word]) == [word]
    assert completed(["--config-name=mine"]) == ["--config-name=mine"]


SEVERAL = "accumulation: must be chosen where a step has several micro-batches"
SCHEDULER = "lightning.pytorch.callbacks.GradientAccumulationScheduler"
IN_A_CALLBACK = f"+callbacks.own={{_target_: {SCHEDULER}, scheduling: {{0: 4}}}}"


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        ([MINE[1]], ["model: must be given. Choose model=..., one of trainkit's or"]),
        ([MINE[0]], ["data: must be given, since Net has no train_dataloader"]),
        ([*MINE, "trainer.max_epochs=null"], ["a training needs an end"]),
        (
            ["model._target_=ones_own.Unoptimized", MINE[1]],
            ["optimizer: must be chosen, since Unoptimized has no configure"],
        ),
        ([*MINE, "trainer.accumulate_grad_batches=4"], [SEVERAL]),
        (
            [*MINE, IN_A_CALLBACK],
            ["accumulation: must be chosen", "(GradientAccumulationScheduler=4)"],
        ),
        (["model._target_=no_such_file.Net"], ["there is no module 'no_such_file'"]),
        (["model._target_=pytest.Item"], ["must name something of an allowed package"]),
    ],
)
def test_what_is_missing_is_asked_for(
    words: list[str],
    messages: list[str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    assert own(*words) == 2
    shown = capsys.readouterr().err
    assert all(message in shown for message in messages)
    assert not list(tmp_path.rglob("config.yaml"))


def test_an_optimizer_that_is_chosen(tmp_path: Path) -> None:
    """And data of the module's own."""
    words = ["model._target_=ones_own.WithData", "optimizer=sgd", "optimizer.lr=0.1"]
    assert own(*words, "trainer.max_epochs=1", "name=other") == 0
    assert the_run(tmp_path).parent.name == "other"


def test_conf_of_the_current_folder_is_found(tmp_path: Path) -> None:
    own_option(tmp_path / "conf", "model", "ones_own.Net")
    own_option(tmp_path / "conf", "data", "ones_own.Data")
    words = ["model=mine", "data=mine", "accumulation=per_sample"]
    assert main(["check", "train", *words]) == 0  # needs no end
    assert own(*words, "trainer.max_epochs=1") == 0
    assert own("ckpt_path=last", "trainer.max_epochs=2") == 0
    assert summary_of(the_run(tmp_path))["steps"] == 10


def test_several_micro_batches_with_a_strategy_and_clipping(tmp_path: Path) -> None:
    words = ["accumulation=per_sample", "trainer.accumulate_grad_batches=4"]
    assert own(*MINE, *words, "trainer.gradient_clip_val=0.5") == 0
    assert summary_of(the_run(tmp_path))["steps"] == 4


def test_a_file_of_ones_own_comes_before_trainkits_of_that_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "optimizer=sgd", "--cfg=job", "--package=optimizer"]
    assert main(words) == 0
    assert "lr: 0.1\n" in capsys.readouterr().out  # the control: trainkit's
    (tmp_path / "conf" / "optimizer").mkdir(parents=True)
    (tmp_path / "conf" / "optimizer" / "sgd.yaml").write_text("lr: 7\n")
    for more in ([], [f"--config-dir={tmp_path / 'conf'}"]):
        assert main([*words, *more]) == 0
        assert capsys.readouterr().out.strip().endswith("lr: 7")
        assert Composition(["optimizer=sgd", *more]).config.optimizer == {"lr": 7}


@pytest.mark.parametrize(
    ("folder", "words"), [("conf", ["model=mine"]), ("configs", ["trainer=gpu", "-m"])]
)
def test_the_root_configuration_of_another_program_is_refused(
    folder: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / folder / "train.yaml"
    root.parent.mkdir()
    root.write_text("seed: 7\n")
    for command in (["train"], ["check", "train"]):
        before = sorted(tmp_path.rglob("*"))
        assert main([*command, *words]) == 2
        shown = capsys.readouterr().err
        assert shown.startswith("trainkit: ")
        assert f"{folder}/train.yaml: trainkit train reads its own train.yaml" in shown
        assert "- trainkit_callbacks. Or let trainkit train the project" in shown
        assert shown.count("\n") == 1
        assert sorted(tmp_path.rglob("*")) == before


def test_what_names_its_classes_needs_no_configs(tmp_path: Path) -> None:
    """The control. A `conf/` of one's own does not either, nor who only looks."""
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "train.yaml").write_text("seed: 7\n")
    assert main(["train", "--cfg=job"]) == 0
    assert own(*MINE) == 0
    (tmp_path / "conf").mkdir()
    assert main(["train", "--cfg=job", "experiment=lines"]) == 0


def test_a_root_that_is_not_built_on_trainkits_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "mine.yaml").write_text("seed: 7\n")
    words = ["train", "--config-path=configs", "--config-name=mine"]
    assert main(words) == 2
    shown = capsys.readouterr().err
    assert "configuration: must have what trainkit's train.yaml has" in shown
    assert "without accumulation, micro_batching, lr_scaling." in shown
    (tmp_path / "configs" / "mine.yaml").write_text("defaults: [train, _self_]\n")
    assert main([*words, *MINE, *EPOCHS]) == 0  # the control


def test_a_configuration_of_a_package_is_found_again_when_its_run_goes_on(
    tmp_path: Path,
) -> None:
    own_option(tmp_path / "of_one", "data", "ones_own.Data")
    for each in ("", "data"):
        (tmp_path / "of_one" / each / "__init__.py").touch()
    assert own("--config-path=pkg://of_one", MINE[0], "data=mine") == 0
    assert own("ckpt_path=last", "trainer.max_epochs=3") == 0
    assert summary_of(the_run(tmp_path))["steps"] == 15


def test_another_clone_of_trainkit_is_read_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A git worktree, say, whose groups differ from those that are installed."""
    shutil.copytree(conf_dir(), tmp_path / "conf", dirs_exist_ok=True)
    (tmp_path / "trainkit" / "config").mkdir(parents=True)
    (tmp_path / "trainkit" / "config" / "conf.py").touch()
    (tmp_path / "conf" / "optimizer" / "sgd.yaml").write_text("lr: 7\n")
    root = tmp_path / "conf" / "train.yaml"
    root.write_text(root.read_text().replace("seed: 0", "seed: 99"))
    assert main(["train", "optimizer=sgd", "--cfg=job"]) == 0
    shown = capsys.readouterr().out
    assert "lr: 7\n" in shown
    assert "seed: 99" in shown


@pytest.mark.parametrize(
    ("checks", "status", "said"),
    [
        ("now", 2, "No step was taken with it"),  # so nothing has begun
        ("late", 1, "checks=now to stop before"),
    ],
)
def test_what_is_said_of_a_loss_that_is_not_finite_can_be_done(
    checks: str, status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["model._target_=ones_own.Broken", MINE[1], "accumulation=per_sample"]
    words += [f"checks={checks}", "proof=off", "trainer.max_epochs=1"]
    assert own(*words) == status
    assert said in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore")  # of Lightning, that the loader is empty
def test_what_cannot_be_trained_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for word, said in (
        ("model._target_=ones_own.number", "and ones_own.number has made one of int"),
        ("+logger.x._target_=ones_own.number", "must make a Logger, and ones_own"),
        ("data._target_=ones_own.number", "and ones_own.number has made one of int"),
        ("data._target_=ones_own.Empty", "the training loader must have batches"),
    ):
        assert own(*MINE, word) == 2
        assert said in capsys.readouterr().err
        assert not (tmp_path / "outputs").exists()
    assert own(*MINE, "model._target_=ones_own.module") == 0  # the control
