"""A mistake is one message and status 2, and nothing is written."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.cli.evaluate.runs import OWN, files, trainkit
from trainkit.cli.evaluate.main import main
from trainkit.errors import TrainkitError


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
        (
            ["ckpt_path=last"],
            "The checkpoint is the first word: trainkit test",
        ),
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
    assert refused("must be given one run or a checkpoint in its folder", tmp_path)
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
