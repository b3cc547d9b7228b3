"""The table of windows that a noise scale gives, for `trainkit plan`."""

from __future__ import annotations

import math
from typing import Any

from trainkit.cli.aligned import aligned
from trainkit.cli.plan.scaling import BY_NOISE, Reference
from trainkit.core.noise.advice import short
from trainkit.core.noise.estimate import per_sample, per_step
from trainkit.core.noise.from_run import read_noise_scale
from trainkit.core.plan.scaling import gain
from trainkit.errors import TrainkitError
from trainkit.lit.callback.table import Row

_DOUBLED = 3
"""How often the window is doubled, and how often halved."""


def read(text: str) -> dict[str, float | None]:
    """The noise scale as the option says it: `samples`, and of a run `low`, `high`.

    >>> read("210")
    {'samples': 210.0, 'low': None, 'high': None}

    Raises:
        TrainkitError: it is neither a positive number nor the folder of a run that
            knows its noise scale.
    """
    try:
        samples = float(text)
    except ValueError:
        try:
            found = read_noise_scale(text)
        except TrainkitError as error:
            said = str(error).removeprefix("noise_scale: ")
            raise TrainkitError(f"trainkit plan --noise-scale: {said}") from error
        return {"samples": found.samples, "low": found.low, "high": found.high}
    if not 0 < samples < math.inf:
        raise TrainkitError(
            f"trainkit plan --noise-scale: must be a positive number of samples or the "
            f"folder of a run, received {text!r}."
        )
    return {"samples": samples, "low": None, "high": None}


def windows(
    noise_scale: float, effective: int, world_size: int, reference: Reference | None
) -> list[dict[str, Any]]:
    """Powers of two around a window, and itself, with what each of them gives.

    Args:
        noise_scale: in samples.
        effective: the window of the plan.
        world_size: the number of devices.
        reference: a rate and its window.
    """
    middle = math.floor(math.log2(effective))
    sizes = {2**n for n in range(max(middle - _DOUBLED, 0), middle + _DOUBLED + 1)}
    return [
        _window(noise_scale, size, world_size, reference) | {"plan": size == effective}
        for size in sorted(sizes | {effective})
    ]


def _window(
    noise_scale: float, size: int, world_size: int, reference: Reference | None
) -> dict[str, Any]:
    time = 1 + size / noise_scale
    found: dict[str, Any] = {
        "window": size,
        "per_step": per_step(noise_scale, size),
        "per_sample": per_sample(noise_scale, size),
        "time": time,
        "speed": min(world_size, size) / time,
    }
    names = ("gain", "lr_sgd", "lr_adam")
    if reference is None:
        return found | dict.fromkeys(names)
    times = gain(noise_scale, reference.batch, size)
    rates = (times, reference.lr * times, reference.lr * math.sqrt(times))
    return found | dict(zip(names, rates, strict=True))


def describe(report: dict[str, Any]) -> list[Row]:
    """The noise scale, and the rate of the plan by `gain`, as rows of a table."""
    samples, low, high = report["noise_scale"].values()
    ends = "" if low is None else f" ({short(low)} to {short(high)}, 90 %)"
    rows = [
        (
            "noise scale",
            f"{short(samples)} samples{ends}; a model's estimate, good to about a "
            f"factor of 2",
        )
    ]
    (plan,) = (each for each in report["windows"] if each["plan"])
    if plan["gain"] is not None:
        rates = f"{plan['lr_sgd']:.6g} for SGD, {plan['lr_adam']:.6g} for Adam"
        rows.append((f"lr, {BY_NOISE}", f"{rates} (gain = {plan['gain']:.4g})"))
    return rows


def table(report: dict[str, Any]) -> list[str]:
    """The lines of the table of windows, and what its columns mean."""
    found, devices = report["windows"], report["world_size"]
    heads = ["window", "per step", "per sample", "time"]
    heads += [f"speed of {devices}"] * (devices > 1)
    has_rates = found[0]["gain"] is not None
    heads += ["gain", "lr, SGD", "lr, Adam"] * has_rates
    rows = [heads]
    for each in found:
        cells = [f"{each['window']:,}{' (this plan)' * each['plan']}"]
        cells += [f"{100 * each[name]:.3g} %" for name in ("per_step", "per_sample")]
        cells += [f"x {each['time']:.3g}"]
        cells += [f"x {each['speed']:.3g}"] * (devices > 1)
        if has_rates:
            cells += [f"x {each['gain']:.3g}"]
            cells += [f"{each[name]:.3g}" for name in ("lr_sgd", "lr_adam")]
        rows.append(cells)
    return ["", *aligned(rows), "", *_MEANS, *(_SPEED if devices > 1 else ())]


_MEANS = (
    "per step: progress as a share of an endless window's step; per sample: as a share",
    "of a sample's in a tiny window; time: to equal progress on one device, and the",
    "samples it takes, in times those of tiny windows, if any window runs as fast",
)
_SPEED = (
    "speed: of all devices, in times that of one with tiny windows, if nothing is lost",
    "between them",
)
