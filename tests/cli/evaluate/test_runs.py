"""A run is evaluated with its own configuration; a mistake is one message."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer

from tests.cli.evaluate.runs import OWN, files, result, trainkit
from tests.cli.fit.lightning_runs import stand_alone
from tests.cli.ones_own import Data, Net
from tests.recipes.debugging import small
from trainkit.cli.evaluate.main import main
from trainkit.cli.runs.checkpoint import best_checkpoint
from trainkit.cli.runs.folder import RunFolder
from trainkit.errors import TrainkitError


def validations(run: Path) -> dict[int, float]:
    """What the training's own validations have logged, after so many steps."""
    with (run / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["val/loss"]]
    return {int(row["step"]): float(row["val/loss"]) for row in rows}


def test_of_validation(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It finds the number that the training's own validation has logged at that step,
    and of other weights another one."""
    before = files(run)
    logged = validations(run)
    capsys.readouterr()
    assert trainkit("validate", run) == 0
    said = capsys.readouterr().out
    found = result(run, "validate")
    assert found["checkpoint"] == "checkpoints/best.ckpt"
    assert found["metrics"] == {"val/loss": logged[found["step"]]}
    assert found["metrics"]["val/loss"] == min(logged.values())
    assert f"validate: checkpoints/best.ckpt of step {found['step']}\n" in said
    assert "window" not in said
    assert "proof" not in said
    assert len(said.splitlines()) == 3
    last = run / "checkpoints" / "last.ckpt"
    assert trainkit("validate", last) == 0
    of_last = result(run, "validate")
    assert of_last["step"] == 20
    assert of_last["metrics"] == {"val/loss": logged[20]}
    assert of_last["metrics"] != found["metrics"]  # the control
    # The run stays as it was.
    after = files(run)
    assert after.keys() - before.keys() == {"validate.json"}
    assert {name: after[name] for name in before} == before
    (run / "validate.json").unlink()


def test_the_best_checkpoint_has_its_name_or_a_callback_knows_it(
    tmp_path: Path,
) -> None:
    folder = RunFolder(tmp_path)
    folder.checkpoints.mkdir()
    assert best_checkpoint(folder) is None
    for monitor, best in ((None, "last.ckpt"), ("val/loss", "mine.ckpt")):
        state = {"monitor": monitor, "best_model_path": "/moved/mine.ckpt"}
        content = {"state_dict": {}, "callbacks": {"ModelCheckpoint": state}}
        for name in ("mine.ckpt", "last.ckpt"):
            torch.save(content, folder.checkpoints / name)
        assert best_checkpoint(folder) == folder.checkpoints / best
    (folder.checkpoints / "best.ckpt").touch()
    assert best_checkpoint(folder) == folder.checkpoints / "best.ckpt"


def test_of_a_test_with_overrides(run: Path) -> None:
    assert trainkit("test", run) == 0
    found = result(run, "test")
    module = Net()
    best = torch.load(run / "checkpoints" / "best.ckpt")
    module.load_state_dict(best["state_dict"])
    alone = Trainer(logger=False, accelerator="cpu", enable_progress_bar=False)
    (wanted,) = alone.test(module, Data(), verbose=False)
    assert found["metrics"] == wanted
    assert trainkit("test", run, "+data.test_rows=5") == 0
    again = result(run, "test")
    assert again["overrides"] == ["+data.test_rows=5"]
    assert again["metrics"] != wanted


def test_log_exact_and_layers_that_a_guard_has_changed(tmp_path: Path) -> None:
    words = [*small("digits_bn", epochs=1), "batchnorm=group_norm", "report=false"]
    assert trainkit("train", *words, "name=run") == 0
    (run,) = (tmp_path / "outputs" / "run").iterdir()
    assert trainkit("validate", run) == 0
    found = result(run, "validate")
    assert found["metrics"]["val/loss"] == validations(run)[found["step"]]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stand_alone(monkeypatch, tmp_path)


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_a_run_of_the_lightning_cli_is_given_by_its_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its folder alone is refused, with the words that name them."""
    options = [f"--model={OWN}.Net", f"--data={OWN}.Data", "--seed_everything=3"]
    options += ["--trainer.accelerator=cpu", "--trainer.max_epochs=1"]
    options += ["--trainer.enable_progress_bar=false", "--trainer.log_every_n_steps=1"]
    options += ["--trainer.logger=lightning.pytorch.loggers.CSVLogger"]
    options += [f"--trainer.logger.save_dir={tmp_path}"]
    assert trainkit("fit", *options) == 0
    run = tmp_path / "lightning_logs" / "version_0"
    (checkpoint,) = (run / "checkpoints").iterdir()
    said = "trainkit test --config=RUN/config.yaml --ckpt_path=RUN/checkpoints/..."
    assert is_refused(capsys, run, said, "test", run)
    files = [f"--config={run / 'config.yaml'}", f"--ckpt_path={checkpoint}"]
    assert trainkit("test", *files) == 0
    assert "test/loss" in capsys.readouterr().out


def is_refused(
    capsys: pytest.CaptureFixture[str], run: Path, text: str, *words: object
) -> bool:
    before = files(run)
    capsys.readouterr()
    status = trainkit(*words)
    shown = capsys.readouterr().err
    is_one = shown.count("trainkit: ") == 1 and "Traceback" not in shown
    assert text in shown
    return status == 2 and is_one and files(run) == before


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["data.nothing=1"], "Could not override 'data.nothing'"),
        (["--trainer.devices=1"], "--trainer.devices=1. Settings have no dashes"),
        (["-m", "seed=1,2"], "key=value without dashes, received '--multirun'"),
        (["ckpt_path=last"], "The checkpoint is the first word: trainkit test"),
        (["other"], "after the run stand overrides of trainkit train, ke"),
        (["+model.width=6"], "checkpoints/best.ckpt does not fit this configuration"),
        (["trainer.limit_test_batches=0"], "test_dataloader: must give at least one b"),
        ([f"model._target_={OWN}.Bare"], "model: must have test_step to test, and "),
        ([f"data._target_={OWN}.BareData"], "data: BareData has no test_dataloader."),
        ([f"data._target_={OWN}.loader", "+data.seed=1", "+data.rows=3"], "received D"),
        (["data._target_=nothing.Data"], "there is no module 'nothing'"),
        ([f"model._target_={OWN}.Advised"], "write accumulation=per_sample, and not"),
        (["trainer.accelerator=tpu"], "trainer: lightning.pytorch.Trainer could not"),
    ],
)
def test_of_overrides(
    words: list[str], text: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert is_refused(capsys, run, text, "test", run, *words)


def test_of_predictions(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, text in (
        ([f"model._target_={OWN}.Bare"], "Write predict_step(self, batch, batch_idx)"),
        (["trainer.devices=2"], "trainer.devices: must be 1 to predict"),
        ([f"data._target_={OWN}.BareData"], "BareData has no predict_dataloader"),
    ):
        assert is_refused(capsys, run, text, "predict", run, *words)


def test_of_places(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(text: str, *words: object) -> bool:
        return is_refused(capsys, run, text, "test", *words)

    near = run / "checkpoints" / "bset.ckpt"
    assert refused("does not exist. Did you mean best.ckpt? For", near)
    for word in ("seed=1", "ckpt_path=last"):
        assert refused("first word must be the folder of a run or a checkpoint", word)
    assert refused("must be given a run or options, received nothing")
    assert refused("must be given one run of trainkit train or a checkpoint", tmp_path)
    alone = shutil.copy(run / "checkpoints" / "best.ckpt", tmp_path)
    assert refused("whose configuration it needs, and", alone)
    for name in ("one", "two"):
        shutil.copytree(run, tmp_path / name)
    assert refused(f"The last of 2 below it:\n  {tmp_path}/one", tmp_path)
    shutil.rmtree(tmp_path / "one" / "checkpoints")
    assert refused("the run must have a checkpoint, and", tmp_path / "one")
    last = tmp_path / "two" / "checkpoints" / "last.ckpt"
    for content in (b"", b"text", last.read_bytes()[:-50]):
        last.write_bytes(content)
        assert refused("must be a readable checkpoint, received", last)
    torch.save({"weights": {}}, last)
    assert refused("must be a readable checkpoint, received", last)
    assert trainkit("test", tmp_path / "two" / "checkpoints") == 0  # the control


def test_secrets_are_asked_for_and_more_devices_are_left_out(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A secret of a logger is not needed, which is left out too."""
    own = Path(shutil.copytree(run, tmp_path / "own"))
    words = (run / "overrides.yaml").read_text()
    more = "- +logger.csv.api_key=<redacted>\n- trainer.devices=2\n"
    (own / "overrides.yaml").write_text(words + more)
    assert trainkit("test", own) == 0
    said = "on one device, which gives each row once; the run had trainer.devices=2"
    assert said in capsys.readouterr().out
    (own / "overrides.yaml").write_text(words + "- +data.api_key=<redacted>\n")
    with pytest.raises(TrainkitError, match=r"command line: data\.api_key="):
        main(["test", str(own)])
