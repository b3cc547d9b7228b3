"""`trainkit plan`: what it prints, what it refuses, what it does not load."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainkit.cli.plan.main import main
from trainkit.cli.plan.report import Reference, overrides, windows
from trainkit.core.noise.estimate import NoiseEstimate
from trainkit.core.plan.effective_batch import BatchPlan
from trainkit.core.plan.scaling import RULES
from trainkit.errors import TrainkitError

PLAN = ["--target", "512", "--world-size", "4", "--max-micro-batch", "24"]
RATE = ["--lr", "0.1", "--reference", "256"]
EPOCH = ["--dataset-size", "50001"]


def report(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_lines_say_what_the_issue_asks_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, *EPOCH, "--drop-last", *RATE, "--rule", "adam-sde"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "trainkit | micro-batch: 16 samples on each rank",
        "trainkit | accumulation: 8 micro-batches",
        "trainkit | ranks: 4",
        "trainkit | effective batch: 512 samples a step, exactly the target",
        "trainkit | epoch: 98 optimizer steps over 50,001 samples, 781 micro-batches "
        "on each rank",
        "trainkit | last window: 320 of 512 samples, 5 of 8 micro-batches",
        "trainkit | seen twice: 3 samples, so that ranks are even",
        "trainkit | left out: 20 samples, by --drop-last",
        "trainkit | lr, adam-sde: 0.141421, beta1 0.8, beta2 0.998, eps 7.07107e-09 "
        "(k = 2)",
        "trainkit | Hydra: trainkit train trainer=ddp trainer.devices=4 "
        "data.batch_size=16 trainer.accumulate_grad_batches=8 optimizer.lr=0.1 "
        "lr_scaling=adam_sde lr_scaling.reference_batch=256",
        "trainkit | Lightning CLI: trainkit fit --trainer.strategy=ddp "
        "--trainer.devices=4 --data.batch_size=16 "
        "--trainer.accumulate_grad_batches=8 --lr_scaling.rule=adam-sde "
        "--lr_scaling.reference_batch=256 (the rate for the reference batch is an "
        "argument of your module)",
    ]
    main([*PLAN, "--dataset-size", "51200"])
    assert "last window: as full as the others\n" in capsys.readouterr().out


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
    assert found["epoch"] == vars(plan.epoch(50_001))
    assert {each["rule"]: each["lr"] for each in found["scaling"]} == {
        rule: plan.scaled_rate(0.1, reference_batch=256, rule=rule) for rule in RULES
    }
    more = "data.batch_size=16 trainer.accumulate_grad_batches=8"
    rate = "optimizer.lr=0.1 lr_scaling=auto lr_scaling.reference_batch=256"
    train = f"trainer=ddp trainer.devices=4 {more} {rate}".split()
    fit = f"trainer.strategy=ddp trainer.devices=4 {more} lr_scaling.rule=auto".split()
    fit = [f"--{word}" for word in (*fit, "lr_scaling.reference_batch=256")]
    assert found["overrides"] == {"train": train, "fit": fit}


def test_fit_gets_the_ranks_that_were_probed() -> None:
    """The control: how many micro-batches there are, the plan says."""
    plan = BatchPlan.make(target=512, world_size=4, max_micro_batch=24)
    ranks = ["trainer.devices=2", "+trainer.num_nodes=2", "seed=1", "~trainer.x"]
    words = ["trainer=ddp", *ranks, "trainer.accumulate_grad_batches=3"]
    fit = "strategy=ddp devices=2 num_nodes=2".split()
    sizes = overrides(plan)["fit"][-2:]
    found = overrides(plan, words=words)["fit"]
    assert found == [*(f"--trainer.{word}" for word in fit), *sizes]


def test_no_key_of_the_data_is_ever_missing(capsys: pytest.CaptureFixture[str]) -> None:
    everything = report(capsys, *PLAN, *EPOCH, *RATE, "--noise-scale", "210")
    bare = report(capsys, *PLAN)
    assert list(bare) == list(everything)
    nothing = [key for key in bare if bare[key] is None]
    missing = ["epoch", "scaling", "noise_scale", "windows", "trials"]
    assert nothing == missing


@pytest.mark.parametrize(
    ("rule", "lr", "changed"),
    [
        ("linear", 0.2, (None, None, None)),
        ("sqrt", 0.1 * 2**0.5, (None, None, None)),
        ("none", 0.1, (None, None, None)),
        ("half-life", 0.1, (None, 0.95**2, None)),
        ("adam-sde", 0.1 * 2**0.5, (0.6, 0.9, 1e-6 / 2**0.5)),
    ],
)
def test_one_rule_equals_its_formula(
    rule: str, lr: float, changed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    adam = ["--betas", "0.8", "0.95", "--eps", "1e-6"]
    (scaled,) = report(capsys, *PLAN, *RATE, "--rule", rule, *adam)["scaling"]
    assert (scaled["rule"], scaled["k"], scaled["problem"]) == (rule, 2, None)
    assert scaled["lr"] == pytest.approx(lr, rel=1e-12)
    for name, value in zip(("beta1", "beta2", "eps"), changed, strict=True):
        assert scaled[name] == (value and pytest.approx(value, rel=1e-12))


def test_a_rule_that_cannot_follow_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    far = [*PLAN, "--lr", "0.1", "--reference", "4"]
    by_rule = {each["rule"]: each for each in report(capsys, *far)["scaling"]}
    assert by_rule["adam-sde"]["lr"] is None
    assert "every beta must stay above 0" in by_rule["adam-sde"]["problem"]
    assert by_rule["linear"]["lr"] == pytest.approx(12.8)
    main(far)
    assert "lr, adam-sde: LRScaling rule='adam-sde': eve" in capsys.readouterr().out


FAR = [*PLAN, "--lr", "0.1", "--reference", "4", "--betas", "0.9", "0.5", "--rule"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], r"trainkit plan: the following arguments are required: --target, --max-"),
        (["--target", "8"], "are required: --max-micro-batch.*--help shows"),
        ([*PLAN, "--target", "8.5"], "--target: invalid int value: '8.5'"),
        ([*PLAN, "--target", "0"], "BatchPlan target: must be a whole number"),
        ([*PLAN, "--targe", "8"], "unrecognized arguments: --targe 8"),
        ([*PLAN, "extra"], "unrecognized arguments: extra"),
        ([*PLAN, *RATE, "--rule", "auto"], "invalid choice: 'auto' .*linear.*adam-sde"),
        ([*PLAN, "--rule", "sqrt"], "--rule: needs --lr, which is missing"),
        ([*PLAN, "--lr", "0.1"], "--lr: needs --reference, which is missing"),
        ([*PLAN, "--reference", "8"], "--reference: needs --lr, which is missing"),
        ([*PLAN, "--drop-last"], "--drop-last: needs --dataset-size, which is missing"),
        ([*PLAN, "--dataset-size", "-1"], "num_samples: must be a whole number"),
        ([*PLAN, *RATE, "--lr", "-1"], "--lr: must be above 0, received -1"),
        ([*PLAN, *RATE, "--lr", "nan"], "--lr: must be above 0, received nan"),
        ([*PLAN, *RATE, "--reference", "0"], "--reference: must be a positive number"),
        ([*PLAN, *RATE, "--reference", "8.5"], "--reference: invalid int value"),
        ([*PLAN, "--eps", "1e-8"], "--eps: needs --lr, which is missing"),
        ([*PLAN, "--betas", "0.9", "0.99"], "--betas: needs --lr, which is missing"),
        ([*PLAN, *RATE, "--eps", "0"], "--eps: must be above 0"),
        ([*PLAN, *RATE, "--betas", "1", "0.9"], "--betas: must be below 1, received 1"),
        ([*FAR, "adam-sde"], "k = 128 beta = 0.9 becomes -11.8:"),
        ([*FAR, "half-life"], "k = 128 beta = 0.5 becomes 2.9.e-39:"),
        ([*PLAN, *RATE, "--rule", "gain"], "--rule gain: needs --noise-scale"),
        ([*PLAN, "--noise-scale", "2", "--rule", "gain"], "--rule: needs --lr"),
    ],
)
def test_a_mistake_is_refused_by_name(argv: list[str], message: str) -> None:
    with pytest.raises(TrainkitError, match=message):
        main(argv)


def test_it_loads_nothing_heavy_and_no_rich_without_a_terminal() -> None:
    program = f"""
import sys
from trainkit.cli.plan.main import main
assert main({[*PLAN, *EPOCH, *RATE, "--noise-scale", "210"]!r}) == 0
assert main({[*PLAN, *EPOCH, *RATE, "--json"]!r}) == 0
heavy = {{"torch", "lightning", "hydra", "omegaconf", "wandb", "numpy", "rich"}}
print(sorted(heavy & set(sys.modules)))
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


SCALE = ["--noise-scale", "210"]
ONE = NoiseEstimate(210.0, 160.0, 280.0, 512.0, 1.0, 120)


def run(path: Path, **summary: Any) -> str:
    (path / "summary.json").write_text(json.dumps(summary))
    return str(path)


def test_the_lines_are_those_of_the_estimate(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*PLAN, *RATE, *SCALE, "--rule", "gain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[4:6] == [
        "trainkit | noise scale: 210 samples; a model's estimate, good to about a "
        "factor of 2",
        "trainkit | lr, gain: 0.129086 for SGD, 0.113616 for Adam (gain = 1.291)",
    ]
    table = [line.split() for line in lines[9:17]]
    assert [row[0] for row in table[1:]] == "64 128 256 512 1,024 2,048 4,096".split()
    assert [row for row in table if "(this" in row] == [
        "512 (this plan) 70.9 % 29.1 % x 3.44 x 1.16 x 1.29 0.129 0.114".split()
    ]


def test_without_a_rate_or_devices_their_columns_are_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["--target", "100", "--max-micro-batch", "25", *SCALE])
    out = capsys.readouterr().out
    assert "speed" not in out
    assert "gain" not in out
    assert out.count("(this plan)") == 1  # between 64 and 128
    main([*PLAN])
    assert "noise" not in capsys.readouterr().out  # the control


@given(
    st.floats(1e-6, 1e9),
    st.integers(1, 10**6),
    st.integers(1, 512),
    st.integers(1, 10**6),
)
def test_each_window_is_what_its_definition_says(
    scale: float, effective: int, devices: int, reference: int
) -> None:
    rate = Reference(batch=reference, lr=0.1, betas=(0.9, 0.999), eps=1e-8)
    found = windows(scale, effective, devices, rate)
    assert [each["window"] for each in found if each["plan"]] == [effective]
    sizes = [each["window"] for each in found]
    assert sizes == sorted(set(sizes))
    for each in found:
        size = each["window"]
        assert size == effective or math.log2(size).is_integer()
        assert each["per_step"] == pytest.approx(size / (size + scale))
        assert each["per_step"] + each["per_sample"] == pytest.approx(1)
        # One device takes `size` long for a step of progress size / (size + scale).
        assert each["time"] == pytest.approx(size / each["per_step"] / scale)
        assert each["speed"] * each["time"] == pytest.approx(min(devices, size))
        ratio = each["per_step"] / (reference / (reference + scale))
        assert each["gain"] == pytest.approx(ratio)
        assert each["lr_sgd"] == pytest.approx(0.1 * ratio)
        assert each["lr_adam"] == pytest.approx(0.1 * math.sqrt(ratio))


def test_a_run_says_its_own_with_the_interval(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run(tmp_path, noise_scale=ONE.facts())
    found = report(capsys, *PLAN, "--noise-scale", folder)
    assert found["noise_scale"] == {"samples": 210.0, "low": 160.0, "high": 280.0}
    number = report(capsys, *PLAN, *SCALE)
    assert number["noise_scale"] == {"samples": 210.0, "low": None, "high": None}
    assert number["windows"] == found["windows"]
    main([*PLAN, "--noise-scale", folder])
    assert "noise scale: 210 samples (160 to 280, 90 %); a" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "rule", "rules"),
    [
        (SCALE, "gain", {"linear", "sqrt", "none", "half-life", "adam-sde"}),
        ([*SCALE, "--rule", "gain"], "gain", set()),  # it is in the table of windows
        ([*SCALE, "--rule", "sqrt"], "sqrt", {"sqrt"}),
        (["--rule", "none"], "none", {"none"}),
        ([], "auto", {"linear", "sqrt", "none", "half-life", "adam-sde"}),
    ],
)
def test_the_rule_to_paste_is_gain_unless_another_is_named(
    words: list[str], rule: str, rules: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    found = report(capsys, *PLAN, *RATE, *words)
    train, fit = found["overrides"].values()
    assert {each["rule"] for each in found["scaling"]} == rules
    assert f"lr_scaling={rule}" in train
    assert (f"--lr_scaling.rule={rule}" in fit) == (rule != "none")
    for word, is_there in (
        ("lr_scaling.noise_scale=210", rule == "gain"),
        ("lr_scaling.reference_batch=256", rule != "none"),
    ):
        assert (word in train) == (f"--{word}" in fit) == is_there


@pytest.mark.parametrize("wrong", ["0", "-1", "nan", "inf", "-inf", "1e999", "21O"])
def test_a_number_that_is_no_size_is_refused(wrong: str) -> None:
    said = rf"--noise-scale: must be a positive number or the .* received '{wrong}'"
    with pytest.raises(TrainkitError, match=said):
        main([*PLAN, f"--noise-scale={wrong}"])


@pytest.mark.parametrize(
    ("summary", "said"),
    [
        (None, "has no summary.json"),
        ({}, r"has measured none. Train with callbacks=\[NoiseScale\(\)\]"),
        ({"noise_scale": None}, "has measured none"),
        ({"noise_scale": {**ONE.facts(), "high": None}}, "at least 160 samples"),
    ],
)
def test_a_run_that_does_not_know_it_is_refused(
    summary: dict[str, Any] | None, said: str, tmp_path: Path
) -> None:
    folder = str(tmp_path) if summary is None else run(tmp_path, **summary)
    with pytest.raises(TrainkitError, match=f"argument --noise-scale: .*{said}"):
        main([*PLAN, "--noise-scale", folder])
