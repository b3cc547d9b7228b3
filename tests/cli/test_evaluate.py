"""`trainkit validate`, `test` and `predict` of a run, with its own configuration."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader, TensorDataset

from tests.cli.ones_own import Data, Net, loader
from tests.cli.training import the_run, train
from tests.helpers import trainer
from tests.recipes.small import small
from trainkit.cli.evaluate import main as evaluate
from trainkit.cli.evaluate.predictions import Predictions, rows_of
from trainkit.cli.main import main
from trainkit.cli.runs.checkpoint import best_checkpoint
from trainkit.cli.runs.folder import RunFolder
from trainkit.errors import TrainkitError

OWN = "tests.cli.ones_own"
EPOCHS = """
trainer.max_epochs=4 trainer.log_every_n_steps=1 report=false name=run
""".split()


def trained(
    where: Path, *words: str, model: str = "Net", data: str = "Data", status: int = 0
) -> Path:
    """A small run in this process."""
    classes = [f"model._target_={OWN}.{model}", f"data._target_={OWN}.{data}"]
    assert status_of(lambda: train(*classes, *words, small=EPOCHS)) == status
    return the_run(where)


def trainkit(*words: Any) -> int:
    GlobalHydra.instance().clear()
    return status_of(lambda: main([str(word) for word in words]))


def result(run: Path, verb: str) -> dict[str, Any]:
    return json.loads((run / f"{verb}.json").read_text())


def files(folder: Path) -> dict[str, bytes]:
    """All files below a folder with their content, without locks."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


def status_of(call: Callable[[], int]) -> Any:
    try:
        return call()
    except SystemExit as end:  # after a signal
        return end.code


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run for all that only look at it."""
    where = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(where)
        patch.setattr("sys.argv", ["trainkit"])
        return trained(where)


def validations(run: Path) -> dict[int, float]:
    """What the training's own validations have logged, after so many steps."""
    with (run / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["val/loss"]]
    return {int(row["step"]): float(row["val/loss"]) for row in rows}


def test_a_validation(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    (run / "validate.json").unlink()
    assert files(run) == before  # the run stays as it was


def test_the_best_checkpoint_has_its_name_or_is_known(tmp_path: Path) -> None:
    """A callback of one's own knows its path."""
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


def test_a_test_with_overrides(run: Path) -> None:
    assert trainkit("test", run) == 0
    found = result(run, "test")
    module = Net()
    best = torch.load(run / "checkpoints" / "best.ckpt")
    module.load_state_dict(best["state_dict"])
    (wanted,) = trainer().test(module, Data(), verbose=False)
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


@pytest.mark.usefixtures("for_lightnings_cli")
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


OF_TEST = [
    ("data.nothing=1", "Could not override 'data.nothing'"),
    ("-m seed=1,2", "key=value without dashes, received '--multirun'"),
    ("ckpt_path=last", "The checkpoint is the first word: trainkit test"),
    ("other", "after the run stand overrides of trainkit train, ke"),
    ("+model.width=6", "checkpoints/best.ckpt does not fit this configuration"),
    ("trainer.limit_test_batches=0", "test_dataloader: must give at least one b"),
    (f"data._target_={OWN}.loader +data.seed=1 +data.rows=3", "received D"),
    (f"model._target_={OWN}.Advised", "write accumulation=per_sample, and not"),
]
OF_PREDICT = [
    (f"model._target_={OWN}.Bare", "Write predict_step(self, batch, batch_idx)"),
    ("trainer.devices=2", "trainer.devices: must be 1 to predict"),
    (f"data._target_={OWN}.BareData", "BareData has no predict_dataloader"),
]


@pytest.mark.parametrize(
    ("verb", "words", "text"),
    [*(("test", *row) for row in OF_TEST), *(("predict", *row) for row in OF_PREDICT)],
)
def test_wrong_overrides_are_one_message(
    verb: str, words: str, text: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert is_refused(capsys, run, text, verb, run, *words.split())


def test_wrong_places_are_one_message(
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
        evaluate.main(["test", str(own)])


# ---- predictions: each row once, in the order of the data ----------------------------


def test_predictions_of_a_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert trainkit("predict", run) == 0
    module = Net()
    module.load_state_dict(torch.load(run / "checkpoints" / "best.ckpt")["state_dict"])
    with (run / "predictions.csv").open() as file:
        rows = [{k: float(v) for k, v in row.items()} for row in csv.DictReader(file)]
    inputs, wanted = zip(*loader(3, 10).dataset, strict=True)
    assert [row["wanted"] for row in rows] == torch.stack(wanted).tolist()
    with torch.no_grad():
        found = module(torch.stack(inputs))
    torch.testing.assert_close(torch.tensor([row["found"] for row in rows]), found)
    about = result(run, "predict")
    assert (about["rows"], about["file"]) == (10, "predictions.csv")
    assert about["checkpoint"] == "checkpoints/best.ckpt"
    assert "predictions: 10 rows" in capsys.readouterr().out


class Echo(LightningModule):
    """Predicts what its function makes of the batch's numbers."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self.function(batch[0])


def numbers(count: int, **options: Any) -> Any:
    return DataLoader(TensorDataset(torch.arange(count)), batch_size=4, **options)


def predicted(folder: Path, function: Any, *loaders: Any) -> Predictions:
    writer = Predictions(folder)
    run = trainer(callbacks=[writer])
    try:
        run.predict(Echo(function), [*loaders], return_predictions=False)
    finally:
        writer.close()
    return writer


def test_lists_and_complex_numbers_are_texts_and_loaders_have_a_column(
    tmp_path: Path,
) -> None:
    def step(x: torch.Tensor) -> Any:
        two = torch.complex(x.float(), x.float())
        return {"n": x, "two": two, "list": two[:, None], "dict": [{"a": 1}] * len(x)}

    loaders = numbers(6, num_workers=2), numbers(1)
    writer = predicted(tmp_path, step, *loaders)
    with (tmp_path / "predictions.csv").open(newline="") as file:
        first, _, second, *_, last = rows = list(csv.reader(file))
    assert first == ["dataloader", "n", "two", "list", "dict"]
    assert second == ["0", "1", "(1+1j)", '["(1+1j)"]', '{"a": 1}']
    assert last[:2] == ["1", "0"]
    assert writer.num_rows == len(rows) - 1 == 7
    assert [path.name for path in tmp_path.iterdir()] == ["predictions.csv"]


def test_a_batch_is_written_before_the_next_one_is_predicted(tmp_path: Path) -> None:
    sizes = []

    def step(batch: Any) -> Any:
        (file,) = [*tmp_path.glob(".predictions.*")] or [None]
        sizes.append(file.stat().st_size if file else 0)
        return batch[:, None].expand(-1, 5000)  # more than a buffer of a file

    predicted(tmp_path, step, numbers(12))
    assert sizes[0] == 0 < sizes[1] < sizes[2]


def test_a_prediction_that_fails_leaves_the_earlier_one(tmp_path: Path) -> None:
    def other_columns(batch: Any) -> Any:
        return {"n" if 0 in batch else "m": batch}

    predicted(tmp_path, lambda batch: batch, numbers(5))
    before = (tmp_path / "predictions.csv").read_text()
    with pytest.raises(TrainkitError, match="must have the columns of the first"):
        predicted(tmp_path, other_columns, numbers(5))
    assert (tmp_path / "predictions.csv").read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == ["predictions.csv"]
    with pytest.warns(UserWarning, match="predict returned None"):
        assert predicted(tmp_path, lambda batch: None, numbers(5)).path is None


TWO = torch.tensor([1, 2])


@pytest.mark.parametrize(
    ("prediction", "rows"),
    [
        (TWO, [{"prediction": 1}, {"prediction": 2}]),
        (np.array([1.5, 2.5]), [{"prediction": 1.5}, {"prediction": 2.5}]),
        (["one", "two"], [{"prediction": "one"}, {"prediction": "two"}]),
        ([TWO, TWO[:1]], [{"prediction": [1, 2]}, {"prediction": [1]}]),
        ({"a": TWO, "b": torch.tensor(7)}, [{"a": 1, "b": 7}, {"a": 2, "b": 7}]),
        ({"a": torch.eye(2, dtype=torch.bfloat16)}, [{"a": [1, 0]}, {"a": [0, 1]}]),
    ],
)  # fmt: skip
def test_rows_of_what_predict_step_may_return(prediction: Any, rows: Any) -> None:
    assert rows_of(prediction) == rows
    assert rows_of(prediction, 2) == rows
    with pytest.raises(TrainkitError, match=r"columns of \[2\] rows, for a batch of 3"):
        rows_of(prediction, 3)


@pytest.mark.parametrize(
    ("prediction", "text"),
    [
        ({"a": TWO, "b": [1, 2, 3]}, r"columns of \[2, 3\] rows"),
        (torch.tensor(1.0), r"columns of \[1\] rows, for a batch of 2"),
        ([object()], "an object of object"),
        ({"a": {1, 2}}, "an object of set"),
        ((TWO, TWO), "an object of tuple"),
    ],
)
def test_what_has_no_rows_is_refused(prediction: Any, text: str) -> None:
    with pytest.raises(TrainkitError, match=text):
        rows_of(prediction, 2)
