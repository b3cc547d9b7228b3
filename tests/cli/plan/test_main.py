"""`trainkit plan`: what it prints, what it refuses, what it does not load."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from trainkit.cli.plan.main import main
from trainkit.cli.plan.report import overrides
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


def test_no_key_of_the_data_is_ever_missing(
    capsys: pytest.CaptureFixture[str],
) -> None:
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
