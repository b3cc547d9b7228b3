"""`trainkit plan`: what it prints, what it refuses, and the sizes that it tries."""

from __future__ import annotations

import io
import json
import math
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trainkit.recipes.code_lm import CodeLM  # type: ignore[import-not-found]

from tests.cli.training import SMALL, the_run, train
from trainkit.cli.plan import main
from trainkit.core.noise.estimate import NoiseEstimate
from trainkit.core.plan.effective_batch import BatchPlan
from trainkit.core.plan.scaling import RULES
from trainkit.errors import TrainkitError

PLAN = ["--target", "512", "--world-size", "4", "--max-micro-batch", "24"]
RATE = ["--lr", "0.1", "--reference", "256"]
EPOCH = ["--dataset-size", "50001"]
PROBE = ["--probe", "--target", "16", *SMALL]


def report(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_lines_say_what_to_train_with(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, *EPOCH, *RATE]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "lr, " not in line or "sde" in line] == [
        "trainkit | micro-batch: 16 samples on each rank",
        "trainkit | accumulation: 8 micro-batches",
        "trainkit | ranks: 4",
        "trainkit | effective batch: 512 samples a step, exactly the target",
        "trainkit | epoch: 98 optimizer steps, 782 micro-batches on each rank",
        "trainkit | last window: 340 samples",
        "trainkit | lr, adam-sde: 0.141421, and LRScaling changes betas",
        "trainkit | to train: trainkit train trainer=ddp trainer.devices=4 "
        "data.batch_size=16 trainer.accumulate_grad_batches=8 optimizer.lr=0.1 "
        "lr_scaling=auto lr_scaling.reference_batch=256",
    ]
    main([*PLAN, "--dataset-size", "51200"])
    assert "last window: full\n" in capsys.readouterr().out


def test_a_rule_that_cannot_reach_the_batch_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    far = [*PLAN, "--lr", "0.1", "--reference", "16"]
    assert report(capsys, *far)["rates"]["adam-sde"] is None
    main(far)
    assert "lr, adam-sde: does not reach so far" in capsys.readouterr().out


def test_what_is_not_exact_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--target", "1000", "--world-size", "3", "--max-micro-batch", "24"]
    main(argv)
    out = capsys.readouterr().out
    assert "999 samples a step, not the 1,000 asked for: 3 equal ranks cannot" in out
    found = report(capsys, *argv)
    assert (found["effective"], found["exact"]) == (999, False)


def test_json_equals_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, *PLAN, *EPOCH, *RATE)
    plan = BatchPlan.make(target=512, world_size=4, max_micro_batch=24)
    names = ("target", "world_size", "max_micro_batch", "micro_batch", "accumulate")
    for name in (*names, "effective", "exact"):
        assert found[name] == getattr(plan, name)
    assert found["epoch"] == plan.epoch(50_001)._asdict()
    rates = {"linear": 0.2, "sqrt": 0.1 * 2**0.5, "none": 0.1, "half-life": 0.1}
    assert found["rates"] == {**rates, "adam-sde": 0.1 * 2**0.5}
    more = "data.batch_size=16 trainer.accumulate_grad_batches=8"
    rate = "optimizer.lr=0.1 lr_scaling=auto lr_scaling.reference_batch=256"
    train = f"trainer=ddp trainer.devices=4 {more} {rate}".split()
    assert found["overrides"] == {"train": train}


def test_no_key_of_the_data_is_ever_missing(capsys: pytest.CaptureFixture[str]) -> None:
    everything = report(capsys, *PLAN, *EPOCH, *RATE, "--noise-scale", "210")
    bare = report(capsys, *PLAN)
    assert list(bare) == list(everything)
    missing = ["epoch", "noise_scale", "trials"]
    assert [key for key in bare if bare[key] is None] == missing


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], r"trainkit plan: the following arguments are required: --target"),
        (["--target", "8"], "needs --max-micro-batch, which is missing"),
        ([*PLAN, "--target", "8.5"], "--target: invalid int value: '8.5'"),
        ([*PLAN, "extra"], r"OVERRIDES: needs --probe, .* received \['extra'\]"),
        ([*PLAN, "--lr", "0.1"], "--lr: needs --reference, which is missing"),
        ([*PLAN, "--reference", "8"], "--reference: needs --lr, which is missing"),
        ([*PLAN, *RATE, "--lr", "-1"], "--lr: must be above 0, received -1"),
        ([*PLAN, *RATE, "--reference", "0"], "--reference: must be a positive number"),
        ([*PLAN, *RATE, "--reference", "8.5"], "--reference: invalid int value"),
        ([*PROBE, "--world-size", "2"], "--world-size: --probe takes the ranks of"),
        ([*PROBE, "--targe", "8"], "unrecognized arguments: --targe"),
    ],
)
def test_a_mistake_is_refused_by_name(argv: list[str], message: str) -> None:
    with pytest.raises(TrainkitError, match=message):
        main(argv)


SCALE = ["--noise-scale", "210"]
GAIN = ["gain with SGD", "gain with Adam"]
ONE = NoiseEstimate(210.0, 160.0, 280.0, 512.0, 1.0, 120)


def run(path: Path, **summary: Any) -> str:
    (path / "summary.json").write_text(json.dumps(summary))
    return str(path)


def test_a_noise_scale_says_what_the_window_is_worth(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*PLAN, *RATE, *SCALE]) == 0
    assert capsys.readouterr().out.splitlines()[-5:-1] == [
        "trainkit | lr, gain with SGD: 0.129086",
        "trainkit | lr, gain with Adam: 0.113616",
        "trainkit | noise scale: 210 samples; an estimate, good to about a factor of 2",
        "trainkit | window of 512: above the noise scale, so a larger one hardly "
        "helps: twice as large takes 15 % fewer steps and 71 % more samples to the "
        "same loss, by the estimate of a simple model",
    ]
    main([*PLAN])
    assert "noise" not in capsys.readouterr().out  # the control


@pytest.mark.parametrize(
    ("target", "said"), [("104", "below"), ("106", "near"), ("428", "above")]
)
def test_a_number_is_good_to_a_factor_of_two(
    target: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["--target", target, "--max-micro-batch", "60", *SCALE])
    assert f"window of {target}: {said} the noise scale" in capsys.readouterr().out


@given(st.floats(1e-6, 1e9), st.integers(1, 512), st.integers(1, 10**6))
def test_the_rate_by_gain_is_what_its_definition_says(
    scale: float, target: int, reference: int
) -> None:
    words = ["--lr", "0.1", "--reference", f"{reference}", "--noise-scale", f"{scale}"]
    with redirect_stdout(io.StringIO()) as printed:
        main(["--target", f"{target}", "--max-micro-batch", "9", *words, "--json"])
    rates = json.loads(printed.getvalue())["rates"]
    ratio = (target / (target + scale)) / (reference / (reference + scale))
    assert rates["gain with SGD"] == pytest.approx(0.1 * ratio)
    assert rates["gain with Adam"] == pytest.approx(0.1 * math.sqrt(ratio))


def test_a_run_says_its_own_with_the_interval(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scale = ["--noise-scale", run(tmp_path, noise_scale=ONE.facts())]
    assert report(capsys, *PLAN, *scale)["noise_scale"] == 210.0
    for target, said in (("270", "near"), ("282", "above")):  # the interval ends at 280
        main(["--target", target, "--max-micro-batch", "60", *scale])
        assert f"window of {target}: {said}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "rule", "rules"),
    [(SCALE, "gain", {*RULES, *GAIN}), ([], "auto", {*RULES})],
)
def test_the_rule_to_paste_is_gain_where_the_noise_scale_is_known(
    words: list[str], rule: str, rules: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    found = report(capsys, *PLAN, *RATE, *words)
    train = found["overrides"]["train"]
    assert set(found["rates"]) == rules
    assert {f"lr_scaling={rule}", "lr_scaling.reference_batch=256"} < set(train)
    assert ("lr_scaling.noise_scale=210" in train) == (rule == "gain")


@pytest.mark.parametrize("wrong", ["0", "-1", "nan", "inf", "-inf", "1e999", "21O"])
def test_a_number_that_is_no_size_is_refused(wrong: str) -> None:
    said = rf"noise_scale: must be a positive number or the .* received '{wrong}'"
    with pytest.raises(TrainkitError, match=said):
        main([*PLAN, f"--noise-scale={wrong}"])


@pytest.mark.parametrize(
    ("summary", "said"),
    [
        (None, "No such file .*summary.json"),
        ({}, r"has measured none. Train with callbacks=\[NoiseScale\(\)\]"),
        ({"noise_scale": None}, "has measured none"),
        ({"noise_scale": {**ONE.facts(), "high": None}}, "knows at least 160"),
    ],
)
def test_a_run_that_does_not_know_it_is_refused(
    summary: dict[str, Any] | None, said: str, tmp_path: Path
) -> None:
    folder = str(tmp_path) if summary is None else run(tmp_path, **summary)
    with pytest.raises(TrainkitError, match=f"noise_scale: .*{said}"):
        main([*PLAN, "--noise-scale", folder])


# ---- --probe: sizes are tried on what `trainkit train` would train -------------------


def test_what_it_finds_is_a_plan_with_the_sizes_tried(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found = report(capsys, *PROBE)
    sizes = (found["micro_batch"], found["accumulate"], found["effective"])
    assert sizes == (16, 1, 16)
    assert [trial["size"] for trial in found["trials"]] == [2, 4, 8, 16]
    assert set(found["trials"][0]) == {"size", "fits", "peak_bytes"}
    words = [word for word in PROBE if word in SMALL and "batch_size" not in word]
    words += ["data.batch_size=16", "trainer.accumulate_grad_batches=1"]
    assert found["overrides"]["train"] == words
    assert list(tmp_path.iterdir()) == [], "a plan writes nothing"


def test_its_overrides_train(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found = report(capsys, *PROBE, "--max-micro-batch", "4")
    assert (found["micro_batch"], found["accumulate"]) == (4, 4)
    assert train(*found["overrides"]["train"], small=[]) == 0
    summary = json.loads((the_run(tmp_path) / "summary.json").read_text())
    assert summary["steps"] == 2


def test_lines_show_sizes_and_plan(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = CodeLM.training_step

    def limited(self: Any, batch: Any, *args: Any) -> Any:
        if len(batch["labels"]) > 5:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return step(self, batch, *args)

    monkeypatch.setattr(CodeLM, "training_step", limited)
    assert main([*PROBE, "--lr", "0.1", "--reference", "8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "trainkit | micro-batch 8: does not fit" in lines
    assert "trainkit | micro-batch: 4 samples on each rank" in lines
    overrides = "data.batch_size=4 trainer.accumulate_grad_batches=4"
    for text in ("lr, sqrt: 0.141421", overrides):
        assert any(text in line for line in lines)


def test_a_configuration_of_ones_own_is_found(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "my conf" / "experiment"
    folder.mkdir(parents=True)
    folder.joinpath("mine.yaml").write_text(
        "# @package _global_\ndefaults: [demo]\ndata:\n  batch_size: 8\n"
    )
    argv = [word for word in PROBE[3:] if not word.startswith("data.batch_size")]
    argv += ["--probe", "-cd", "my conf", "experiment=mine"]  # anywhere in the line
    argv += ["--target", "16", "--max-micro-batch", "8"]
    assert [trial["size"] for trial in report(capsys, *argv)["trials"]] == [8]
