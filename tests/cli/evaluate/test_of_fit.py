"""A run of `trainkit fit` is evaluated with the configuration that it has saved."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import yaml

from tests.cli.evaluate.runs import OWN, files, result, trainkit
from tests.cli.fit.lightning_runs import stand_alone
from trainkit.config.redact import REDACTED

LOGGER = "lightning.pytorch.loggers.CSVLogger"
CHECKPOINT = "lightning.pytorch.callbacks.ModelCheckpoint"


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stand_alone(monkeypatch, tmp_path)


def fitted(where: Path, *words: str, model: str = "Net") -> Path:
    options = [f"--model={OWN}.{model}", f"--data={OWN}.Data", "--seed_everything=3"]
    options += ["--trainer.accelerator=cpu", "--trainer.max_epochs=4"]
    options += ["--trainer.enable_progress_bar=false", "--trainer.log_every_n_steps=1"]
    options += [f"--trainer.logger={LOGGER}", f"--trainer.logger.save_dir={where}"]
    assert trainkit("fit", *options, *words) == 0
    return where / "lightning_logs" / "version_0"


def test_its_best_checkpoint_and_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = fitted(
        tmp_path,
        f"--trainer.callbacks+={CHECKPOINT}",
        "--trainer.callbacks.monitor=val/loss",
        "--trainer.callbacks.save_last=true",
        "--trainer.callbacks.save_top_k=-1",
    )
    before = files(tmp_path)
    with (run / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["val/loss"]]
    logged = {int(row["step"]) + 1: float(row["val/loss"]) for row in rows}
    capsys.readouterr()
    assert trainkit("validate", run) == 0
    found = result(run, "validate")
    assert found["metrics"] == {"val/loss": min(logged.values())}
    assert found["metrics"] == {"val/loss": logged[found["step"]]}
    assert f".ckpt of step {found['step']}\n" in capsys.readouterr().out
    assert trainkit("validate", run / "checkpoints" / "last.ckpt") == 0
    last = result(run, "validate")
    assert last["metrics"] == {"val/loss": logged[20]}
    assert last["metrics"] != found["metrics"]  # the control
    assert trainkit("test", run, "--data.test_rows", "5") == 0
    five = result(run, "test")["metrics"]
    assert trainkit("test", run, "--data.test_rows=9") == 0
    assert result(run, "test")["metrics"] != five
    assert trainkit("predict", run) == 0
    assert len((run / "predictions.csv").read_text().splitlines()) == 11
    after = files(tmp_path)
    new = {f"{run.relative_to(tmp_path)}/{verb}.json" for verb in VERBS}
    new.add(f"{run.relative_to(tmp_path)}/predictions.csv")
    assert after.keys() - before.keys() == new
    assert {name: after[name] for name in before} == before


VERBS = ("validate", "test", "predict")


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = fitted(tmp_path, "--trainer.max_epochs=1")
    config = yaml.safe_load((run / "config.yaml").read_text())
    before = files(tmp_path)

    def is_refused(text: str, *words: str) -> bool:
        capsys.readouterr()
        status = trainkit("test", run, *words)
        shown = capsys.readouterr().err
        is_one = shown.count("trainkit: ") == 1 and "Traceback" not in shown
        return status == 2 and text in shown and is_one and files(tmp_path) == before

    assert is_refused("data.test_rows=5", "data.test_rows=5")
    assert is_refused("Option 'rows' is not accepted", "--data.rows=5")
    assert is_refused("--ckpt_path=last", "--ckpt_path=last")
    assert is_refused("does not fit this configuration", "--model.width=6")
    assert is_refused("write --accumulation=PerSample,", f"--model={OWN}.Advised")
    config["model"]["init_args"]["width"] = REDACTED
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    before = files(tmp_path)
    assert is_refused("--model.width: is a secret")
    assert trainkit("test", run, "--model.width=5") == 0  # the control
    (run / "test.json").unlink()
    config["model"] = {"width": 5}  # of a script with its own CLI
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    before = files(tmp_path)
    assert is_refused("Option 'width' is not accepted")
