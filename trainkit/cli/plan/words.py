"""The lines of `trainkit plan`: its report in words, and the table of windows."""

from __future__ import annotations

import shlex
from typing import Any

from trainkit.cli.plan.report import BY_NOISE
from trainkit.cli.printing import aligned
from trainkit.core.noise.advice import short
from trainkit.core.plan.options import brief
from trainkit.lit.callback.table import Row

_MEANS = (
    "per step: progress as a share of an endless window's step; per sample: as a share",
    "of a sample's in a tiny window; time: to equal progress on one device, and the",
    "samples it takes, in times those of tiny windows, if any window runs as fast",
)
_SPEED = (
    "speed: of all devices, in times that of one with tiny windows, if nothing is lost",
    "between them",
)


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
