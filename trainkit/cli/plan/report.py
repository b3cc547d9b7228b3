"""The data of `trainkit plan --json`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trainkit.cli.words import key_of
from trainkit.core.noise.estimate import per_sample, per_step
from trainkit.core.plan.effective_batch import BatchPlan, EpochPlan
from trainkit.core.plan.scaling import RULES, gain
from trainkit.errors import TrainkitError

BY_NOISE = "gain"
"""The rule that goes by the noise scale: its rates stand in the table of windows."""
_DOUBLED = 3
"""How often the window is doubled, and how often halved."""

Scale = dict[str, float | None]
"""A noise scale: `samples`, and `low` and `high` if they are known."""


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
