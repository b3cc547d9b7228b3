"""The report of `trainkit plan`: its data, its lines, and the table of windows."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trainkit.cli.printing import aligned
from trainkit.cli.words import key_of
from trainkit.core.noise.advice import short
from trainkit.core.noise.estimate import per_sample, per_step
from trainkit.core.plan.effective_batch import BatchPlan, EpochPlan
from trainkit.core.plan.options import brief
from trainkit.core.plan.scaling import RULES, gain
from trainkit.errors import TrainkitError
from trainkit.lit.callback.table import Row

BY_NOISE = "gain"
"""The rule that goes by the noise scale: its rates stand in the table of windows."""
_DOUBLED = 3
"""How often the window is doubled, and how often halved."""

Scale = dict[str, float | None]
"""A noise scale: `samples`, and `low` and `high` if they are known."""
_MEANS = (
    "per step: progress as a share of an endless window's step; per sample: as a share",
    "of a sample's in a tiny window; time: to equal progress on one device, and the",
    "samples it takes, in times those of tiny windows, if any window runs as fast",
)
_SPEED = (
    "speed: of all devices, in times that of one with tiny windows, if nothing is lost",
    "between them",
)


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Good hyperparameters, and the effective batch for which they were found."""

    batch: int
    lr: float
    betas: Sequence[float]
    eps: float


def make_report(
    plan: BatchPlan,
    *,
    epoch: EpochPlan | None = None,
    reference: Reference | None = None,
    rule: str | None = None,
    noise_scale: Scale | None = None,
    words: Sequence[str] = (),
) -> dict[str, Any]:
    """All keys but `trials`.

    Args:
        plan: the plan.
        epoch: its epoch, if the size of the data set is known.
        reference: a rate, and the batch to which it belongs.
        rule: the only rule of interest, which the overrides then choose.
        noise_scale: if it is known.
        words: what was probed; it is part of the overrides, and has the ranks.

    Raises:
        TrainkitError: the only rule of interest cannot be applied.
    """
    samples = None if noise_scale is None else noise_scale["samples"]
    return {
        "target": plan.target,
        "world_size": plan.world_size,
        "max_micro_batch": plan.max_micro_batch,
        "micro_batch": plan.micro_batch,
        "accumulate": plan.accumulate,
        "effective": plan.effective,
        "exact": plan.exact,
        "epoch": epoch and asdict(epoch),
        "scaling": reference and _scaled(plan, reference, rule),
        "noise_scale": noise_scale,
        "windows": samples
        and windows(samples, plan.effective, plan.world_size, reference),
        "overrides": overrides(plan, reference, rule, samples, words),
    }


def _scaled(
    plan: BatchPlan, reference: Reference, only: str | None
) -> list[dict[str, Any]]:
    """For each rule but gain its name, k and what it changes, or its problem."""
    k = plan.effective_batch.over(reference.batch)
    beta1, beta2 = reference.betas
    old = {"beta1": beta1, "beta2": beta2, "eps": reference.eps}
    found = []
    for rule in [each for each in RULES.values() if only in (None, each.name)]:
        values: dict[str, Any] = dict.fromkeys(("lr", *old))
        problem = None
        try:
            rule.check_reach(beta1, beta2, k)
            values["lr"] = plan.scaled_rate(
                reference.lr, reference_batch=reference.batch, rule=rule.name
            )
            for name, value in old.items():
                change = getattr(rule, name)
                values[name] = change and change(value, k)
        except TrainkitError as error:
            if only is not None:
                raise
            problem = str(error)
        found.append({"rule": rule.name, "k": k, **values, "problem": problem})
    return found


def windows(
    noise_scale: float, effective: int, world_size: int, reference: Reference | None
) -> list[dict[str, Any]]:
    """Powers of two around the plan's window, and itself, with what each gives."""
    middle = math.floor(math.log2(effective))
    sizes = {2**n for n in range(max(middle - _DOUBLED, 0), middle + _DOUBLED + 1)}
    found = []
    for size in sorted(sizes | {effective}):
        time = 1 + size / noise_scale
        rates: list[Any] = [None] * 3
        if reference is not None:
            times = gain(noise_scale, reference.batch, size)
            rates = [times, reference.lr * times, reference.lr * math.sqrt(times)]
        found.append(
            {
                "window": size,
                "plan": size == effective,
                "per_step": per_step(noise_scale, size),
                "per_sample": per_sample(noise_scale, size),
                "time": time,
                "speed": min(world_size, size) / time,
                **dict(zip(("gain", "lr_sgd", "lr_adam"), rates, strict=True)),
            }
        )
    return found


def overrides(
    plan: BatchPlan,
    reference: Reference | None = None,
    rule: str | None = None,
    noise_scale: float | None = None,
    words: Sequence[str] = (),
) -> dict[str, list[str]]:
    """The arguments with which either command trains by the plan.

    >>> plan = BatchPlan.make(target=64, world_size=4, max_micro_batch=16)
    >>> " ".join(overrides(plan)["train"])
    'trainer=ddp trainer.devices=4 data.batch_size=16 trainer.accumulate_grad_batches=1'
    """
    sizes = {
        "data.batch_size": plan.micro_batch,
        "trainer.accumulate_grad_batches": plan.accumulate,
    }
    train = [word for word in words if key_of(word) not in sizes]
    fit = []
    for word in train:  # fit has options for what they say of the Trainer
        key, value = key_of(word), word.partition("=")[2]
        if word in ("trainer=ddp", "trainer=fsdp"):
            fit.append(f"--trainer.strategy={value}")
        elif key.startswith("trainer.") and not word.startswith("~"):
            fit.append(f"--{key}={value}")
    if plan.world_size > 1 and not words:
        train += ["trainer=ddp", f"trainer.devices={plan.world_size}"]
        fit += ["--trainer.strategy=ddp", f"--trainer.devices={plan.world_size}"]
    train += [f"{key}={size}" for key, size in sizes.items()]
    fit += [f"--{key}={size}" for key, size in sizes.items()]
    if reference is not None:
        rule = rule or ("auto" if noise_scale is None else BY_NOISE)
        # trainkit fit has no option for the rate: it is an argument of the module.
        train += [f"optimizer.lr={reference.lr:g}"]
        train += [f"lr_scaling={rule.replace('-', '_')}"]
        more = [f"lr_scaling.reference_batch={reference.batch}"] * (rule != "none")
        if rule == BY_NOISE:
            more.append(f"lr_scaling.noise_scale={noise_scale:g}")
        train += more
        fit += [f"--{word}" for word in [f"lr_scaling.rule={rule}", *more] if more]
    return {"train": train, "fit": fit}


def describe(report: dict[str, Any]) -> list[Row]:
    """The report as rows of a table."""
    rows = _about_plan(report)
    if report["epoch"] is not None:
        rows += _about_epoch(report)
    rows += [(f"lr, {each['rule']}", _rule(each)) for each in report["scaling"] or ()]
    if report["noise_scale"] is not None:
        rows += _about_noise(report)
    paste = report["overrides"]
    note = " (the rate for the reference batch is an argument of your module)"
    fit = f"trainkit fit {shlex.join(paste['fit'])}"
    rows.append(("Hydra", f"trainkit train {shlex.join(paste['train'])}"))
    rows.append(("Lightning CLI", fit + note * (report["scaling"] is not None)))
    return rows


def _about_plan(report: dict[str, Any]) -> list[Row]:
    verdict = f"{brief(report['effective'])} samples a step, exactly the target"
    if not report["exact"]:
        verdict = (
            f"{brief(report['effective'])} samples a step, not the "
            f"{brief(report['target'])} asked for: {report['world_size']} equal ranks "
            f"cannot make that, and this is nearest"
        )
    return [
        ("micro-batch", f"{_count(report['micro_batch'], 'sample')} on each rank"),
        ("accumulation", _count(report["accumulate"], "micro-batch")),
        ("ranks", f"{report['world_size']}"),
        ("effective batch", verdict),
    ]


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
    how = last if epoch["is_short"] else "as full as the others"
    rows = [("epoch", steps), ("last window", how)]
    for label, number, why in (
        ("seen twice", epoch["num_repeated_samples"], "so that ranks are even"),
        ("left out", epoch["num_dropped_samples"], "by --drop-last"),
    ):
        if number:
            rows.append((label, f"{_count(number, 'sample')}, {why}"))
    return rows


def _rule(scaled: dict[str, Any]) -> str:
    if scaled["problem"] is not None:
        return scaled["problem"]
    values = [
        f"{name} {scaled[name]:.6g}"
        for name in ("beta1", "beta2", "eps")
        if scaled[name] is not None
    ]
    said = ", ".join([f"{scaled['lr']:.6g}", *values])
    return f"{said} (k = {brief(scaled['k'])})"


def _about_noise(report: dict[str, Any]) -> list[Row]:
    samples, low, high = report["noise_scale"].values()
    ends = "" if low is None else f" ({short(low)} to {short(high)}, 90 %)"
    estimate = "a model's estimate, good to about a factor of 2"
    rows = [("noise scale", f"{short(samples)} samples{ends}; {estimate}")]
    (plan,) = (each for each in report["windows"] if each["plan"])
    if plan["gain"] is not None:
        rates = f"{plan['lr_sgd']:.6g} for SGD, {plan['lr_adam']:.6g} for Adam"
        rows.append((f"lr, {BY_NOISE}", f"{rates} (gain = {plan['gain']:.4g})"))
    return rows


def table(report: dict[str, Any]) -> list[str]:
    """The lines of the table of windows, and what its columns mean."""
    found, devices = report["windows"], report["world_size"]
    columns = [
        ("per step", "per_step", "{:.3g} %"),
        ("per sample", "per_sample", "{:.3g} %"),
        ("time", "time", "x {:.3g}"),
        *[(f"speed of {devices}", "speed", "x {:.3g}")] * (devices > 1),
    ]
    if found[0]["gain"] is not None:
        columns.append(("gain", "gain", "x {:.3g}"))
        columns += [("lr, SGD", "lr_sgd", "{:.3g}"), ("lr, Adam", "lr_adam", "{:.3g}")]
    rows = [["window", *(head for head, _, _ in columns)]]
    for each in found:
        window = f"{each['window']:,}{' (this plan)' * each['plan']}"
        values = [each[name] * (100 if "%" in how else 1) for _, name, how in columns]
        said = [how.format(y) for (_, _, how), y in zip(columns, values, strict=True)]
        rows.append([window, *said])
    return ["", *aligned(rows), "", *_MEANS, *(_SPEED if devices > 1 else ())]


def _count(number: int, thing: str) -> str:
    """A number and what it counts.

    >>> _count(1, "micro-batch"), _count(12000, "micro-batch"), _count(2, "sample")
    ('1 micro-batch', '12,000 micro-batches', '2 samples')
    """
    ending = "es" if thing.endswith("ch") else "s"
    return f"{number:,} {thing}{ending if number != 1 else ''}"
