"""The output of `trainkit plan`: data with stable keys, and lines to read."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from trainkit.cli.plan import noise
from trainkit.cli.plan.scaling import BY_NOISE, Reference
from trainkit.cli.words import key_of
from trainkit.core.plan.effective_batch import BatchPlan, EpochPlan
from trainkit.core.plan.options import brief
from trainkit.lit.callback.table import Row


def make_report(
    plan: BatchPlan,
    epoch: EpochPlan | None,
    scaling: list[dict[str, Any]] | None,
    *,
    rule: str | None,
    reference: Reference | None,
    words: Sequence[str] = (),
    noise_scale: dict[str, float | None] | None = None,
) -> dict[str, Any]:
    """The data of `trainkit plan --json`, whose keys its `--help` lists.

    Args:
        plan: the plan.
        epoch: its epoch, if the size of the data set is known.
        scaling: what the rules give, if a rate is known.
        rule: the only rule of interest, which the overrides then choose.
        reference: the rate, and the batch to which it belongs.
        words: what was probed; it is part of the overrides, and has the ranks.
        noise_scale: its `samples`, with `low` and `high` if they are known.
    """
    near = plan.nearby()
    samples = None if noise_scale is None else noise_scale["samples"]
    return {
        "target": plan.target,
        "world_size": plan.world_size,
        "max_micro_batch": plan.max_micro_batch,
        **_sizes(plan),
        "exact": plan.exact,
        "nearby": None if near is None else _sizes(near),
        "epoch": None if epoch is None else asdict(epoch),
        "scaling": scaling,
        "noise_scale": noise_scale,
        "windows": None
        if samples is None
        else noise.windows(samples, plan.effective, plan.world_size, reference),
        "overrides": overrides(
            plan, rule=rule, reference=reference, words=words, noise_scale=samples
        ),
    }


def _sizes(plan: BatchPlan) -> dict[str, int]:
    return {
        "micro_batch": plan.micro_batch,
        "accumulate": plan.accumulate,
        "effective": plan.effective,
    }


def overrides(
    plan: BatchPlan,
    *,
    rule: str | None = None,
    reference: Reference | None = None,
    words: Sequence[str] = (),
    noise_scale: float | None = None,
) -> dict[str, list[str]]:
    """The arguments with which either command trains by the plan.

    >>> plan = BatchPlan.make(target=64, world_size=4, max_micro_batch=16)
    >>> " ".join(overrides(plan)["train"])
    'trainer=ddp trainer.devices=4 data.batch_size=16 trainer.accumulate_grad_batches=1'
    """
    sizes = [
        f"data.batch_size={plan.micro_batch}",
        f"trainer.accumulate_grad_batches={plan.accumulate}",
    ]
    own = {size.partition("=")[0] for size in sizes}
    train = [word for word in words if key_of(word) not in own]
    fit = _for_fit(words)
    if plan.world_size > 1 and not words:
        train += ["trainer=ddp", f"trainer.devices={plan.world_size}"]
        fit += ["--trainer.strategy=ddp", f"--trainer.devices={plan.world_size}"]
    train += sizes
    fit += [f"--{argument}" for argument in sizes]
    if reference is not None:
        rule = rule or ("auto" if noise_scale is None else BY_NOISE)
        # trainkit fit has no option for the rate: it is an argument of the module.
        train += [f"optimizer.lr={reference.lr:g}"]
        train += [f"lr_scaling={rule.replace('-', '_')}"]
        if rule != "none":
            train.append(f"lr_scaling.reference_batch={reference.batch}")
            fit.append(f"--lr_scaling.rule={rule}")
            fit.append(f"--lr_scaling.reference_batch={reference.batch}")
        if rule == BY_NOISE:
            train.append(f"lr_scaling.noise_scale={noise_scale:g}")
            fit.append(f"--lr_scaling.noise_scale={noise_scale:g}")
    return {"train": train, "fit": fit}


def _for_fit(words: Sequence[str]) -> list[str]:
    """What the words say of the Trainer, as options of `trainkit fit`."""
    found = []
    for word in words:
        key, value = key_of(word), word.partition("=")[2]
        if word in ("trainer=ddp", "trainer=fsdp"):
            found.append(f"--trainer.strategy={value}")
        elif key.startswith("trainer.") and not word.startswith("~"):
            found.append(f"--{key}={value}")
    return [each for each in found if "accumulate_grad_batches" not in each]


def describe(report: dict[str, Any]) -> list[Row]:
    """The report as rows of a table."""
    rows = _about_plan(report)
    if report["epoch"] is not None:
        rows += _about_epoch(report)
    for scaled in report["scaling"] or []:
        rows.append((f"lr, {scaled['rule']}", _about_rule(scaled)))
    if report["noise_scale"] is not None:
        rows += noise.describe(report)
    paste = report["overrides"]
    rows.append(("Hydra", f"trainkit train {shlex.join(paste['train'])}"))
    line = f"trainkit fit {shlex.join(paste['fit'])}"
    if report["scaling"] is not None:
        line += " (the rate for the reference batch is an argument of your module)"
    rows.append(("Lightning CLI", line))
    return rows


def _about_plan(report: dict[str, Any]) -> list[Row]:
    target, effective = report["target"], report["effective"]
    if report["exact"]:
        verdict = f"{brief(effective)} samples a step, exactly the target"
    else:
        verdict = (
            f"{brief(effective)} samples a step, not the {brief(target)} asked for: "
            f"{report['world_size']} equal ranks cannot make that, and this is nearest"
        )
    rows = [
        ("micro-batch", f"{_count(report['micro_batch'], 'sample')} on each rank"),
        ("accumulation", f"{_count(report['accumulate'], 'micro-batch')}"),
        ("ranks", f"{report['world_size']}"),
        ("effective batch", verdict),
    ]
    near = report["nearby"]
    if near is not None:
        cheaper = (
            f"{_count(near['micro_batch'], 'sample')} x accumulation "
            f"{brief(near['accumulate'])} = {brief(near['effective'])} samples a step, "
            f"in place of {_count(report['accumulate'], 'micro-batch')}"
        )
        rows.append(("cheaper", cheaper))
    return rows


def _about_epoch(report: dict[str, Any]) -> list[Row]:
    epoch = report["epoch"]
    steps = (
        f"{_count(epoch['num_steps'], 'optimizer step')} over "
        f"{_count(epoch['num_samples'], 'sample')}, "
        f"{_count(epoch['num_micro_batches'], 'micro-batch')} on each rank"
    )
    last = (
        f"{brief(epoch['last_window_samples'])} of "
        f"{_count(report['effective'], 'sample')}, "
        f"{epoch['last_window_micro_batches']} of "
        f"{_count(report['accumulate'], 'micro-batch')}"
    )
    short = last if epoch["is_short"] else "as full as the others"
    rows = [("epoch", steps), ("last window", short)]
    if epoch["num_repeated_samples"]:
        repeated = (
            f"{_count(epoch['num_repeated_samples'], 'sample')}, so that ranks are even"
        )
        rows.append(("seen twice", repeated))
    if epoch["num_dropped_samples"]:
        dropped = f"{_count(epoch['num_dropped_samples'], 'sample')}, by --drop-last"
        rows.append(("left out", dropped))
    return rows


def _about_rule(scaled: dict[str, Any]) -> str:
    if scaled["problem"] is not None:
        return scaled["problem"]
    values = [f"{scaled['lr']:.6g}"]
    for name in ("beta1", "beta2", "eps"):
        if scaled[name] is not None:
            values.append(f"{name} {scaled[name]:.6g}")
    return f"{', '.join(values)} (k = {brief(scaled['k'])})"


def _count(number: int, thing: str) -> str:
    """A number and what it counts.

    >>> _count(1, "micro-batch"), _count(12000, "micro-batch"), _count(2, "sample")
    ('1 micro-batch', '12,000 micro-batches', '2 samples')
    """
    ending = "es" if thing.endswith("ch") else "s"
    return f"{number:,} {thing}{ending if number != 1 else ''}"
