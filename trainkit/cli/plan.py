"""`trainkit plan`: micro-batch and accumulation for the effective batch you mean."""

from __future__ import annotations

import argparse
import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from trainkit.cli.completion import like, places_in
from trainkit.cli.composition import aside, composed
from trainkit.cli.console import Arguments, say_loading
from trainkit.cli.words import CONFIG_DIR, CONFIG_NAME, CONFIG_PATH, key_of
from trainkit.core.noise.advice import advice, read_noise_scale, short
from trainkit.core.noise.estimate import NoiseEstimate
from trainkit.core.plan.effective_batch import BatchPlan, Epoch
from trainkit.core.plan.options import brief, check_size, is_positive_number
from trainkit.core.plan.scaling import RULES, gain
from trainkit.errors import TrainkitError
from trainkit.lit.callback.table import Row, show

if TYPE_CHECKING:
    from trainkit.lit.probe.find import FoundMicroBatch

EXAMPLE = """\
example:
  trainkit plan --target 512 --world-size 4 --max-micro-batch 24 \\
      --dataset-size 50000 --lr 0.1 --reference 256
  trainkit plan --target 512 --max-micro-batch 24 --noise-scale outputs/MyModule/...
  trainkit plan --probe --target 512 model=mine trainer=gpu
"""
BY_NOISE = "gain"
"""The rule that goes by the noise scale."""
BETAS = (0.9, 0.999)
"""Adam's, as torch has them."""
Rates = dict[str, float | None]
"""The learning rate of the planned batch by each rule; None by one that cannot reach it
with these betas."""


def main(argv: list[str]) -> int:
    """Run `trainkit plan`, and return the exit status."""
    args = _parse(argv)
    trials, tried = None, []
    if args.probe:
        found = _probed(args)
        if found is None:
            return 0  # only the first rank prints
        plan, tried = found.plan, found.tried()
        trials = [asdict(trial) for trial in found.trials]
    else:
        plan = BatchPlan.make(
            target=args.target,
            world_size=args.world_size or 1,
            max_micro_batch=args.max_micro_batch,
        )
    size = args.dataset_size
    epoch = None if size is None else plan.epoch(size)
    rates = _rates(plan, args)
    words = overrides_of(plan, args.overrides) + _rate_words(args)
    if args.json:
        report = {
            **asdict(plan),
            "effective": plan.effective,
            "exact": plan.exact,
            "epoch": epoch and epoch._asdict(),
            "rates": rates,
            "noise_scale": args.noise_scale and args.noise_scale.samples,
            "overrides": {"train": words},
            "trials": trials,
        }
        print(json.dumps(report, indent=2))
        return 0
    rows = [*tried, *_about_plan(plan), *([] if epoch is None else _about(epoch))]
    rows += [(f"lr, {rule}", _said(rule, rate)) for rule, rate in rates.items()]
    if args.noise_scale is not None:
        rows += _about_noise(args.noise_scale, plan)
    show([*rows, ("to train", f"trainkit train {shlex.join(words)}")])
    return 0


def _probed(args: argparse.Namespace) -> FoundMicroBatch | None:
    """Measure sizes for what `trainkit train` would train; it leaves no files.

    Returns:
        What was found, on the first rank; None on the others.
    """
    say_loading("plan", ["--json"] if args.json else [])
    from trainkit.cli.runs.ranks import ranks_of_one_run
    from trainkit.config.build import build
    from trainkit.lit.probe.find import find_micro_batch

    with aside("train") as folder:
        training = build(composed([*places_in(args), *args.overrides], folder))
        trainer: Any = training.trainer
        with ranks_of_one_run(trainer):
            found = find_micro_batch(
                trainer,
                training.module,
                training.data,
                target=args.target,
                max_micro_batch=args.max_micro_batch,
                verbose=False,
            )
    return found if trainer.is_global_zero else None


def _rates(plan: BatchPlan, args: argparse.Namespace) -> Rates:
    """The rates by all rules that can be applied."""
    if args.lr is None:
        return {}
    check_size("trainkit plan --reference", args.reference)
    found: Rates = {}
    k = plan.effective / args.reference
    for name, rule in RULES.items():
        found[name] = args.lr * rule.lr(k)
        try:
            rule.check_reach(*BETAS, k)
        except TrainkitError:
            found[name] = None
    if args.noise_scale is not None:
        times = gain(args.noise_scale.samples, args.reference, plan.effective)
        found[f"{BY_NOISE} with SGD"] = args.lr * times
        found[f"{BY_NOISE} with Adam"] = args.lr * math.sqrt(times)
    return found


def _said(rule: str, rate: float | None) -> str:
    """A rate, and what its rule changes besides."""
    if rate is None:
        beta1, beta2 = BETAS
        return f"does not reach so far from --reference, with betas {beta1} and {beta2}"
    changes_betas = rule in RULES and RULES[rule].beta2 is not None
    return f"{rate:.6g}{', and LRScaling changes betas' * changes_betas}"


def _rate_words(args: argparse.Namespace) -> list[str]:
    """The overrides that scale the rate by the rule: `gain` if it can, else `auto`."""
    if args.lr is None:
        return []
    scale: NoiseEstimate | None = args.noise_scale
    rule = "auto" if scale is None else BY_NOISE
    words = [f"optimizer.lr={args.lr:g}", f"lr_scaling={rule}"]
    words.append(f"lr_scaling.reference_batch={args.reference}")
    if scale is not None:
        words.append(f"lr_scaling.noise_scale={scale.samples:g}")
    return words


def overrides_of(plan: BatchPlan, words: Sequence[str] = ()) -> list[str]:
    """The overrides with which `trainkit train` trains by the plan.

    >>> plan = BatchPlan.make(target=64, world_size=4, max_micro_batch=16)
    >>> " ".join(overrides_of(plan))
    'trainer=ddp trainer.devices=4 data.batch_size=16 trainer.accumulate_grad_batches=1'

    Args:
        plan: the plan.
        words: what was probed; they have the ranks.
    """
    sizes = {
        "data.batch_size": plan.micro_batch,
        "trainer.accumulate_grad_batches": plan.accumulate,
    }
    if plan.world_size > 1 and not words:
        words = ["trainer=ddp", f"trainer.devices={plan.world_size}"]
    kept = [word for word in words if key_of(word) not in sizes]
    return [*kept, *(f"{key}={size}" for key, size in sizes.items())]


def _about_plan(plan: BatchPlan) -> list[Row]:
    verdict = f"{brief(plan.effective)} samples a step, exactly the target"
    if not plan.exact:
        verdict = (
            f"{brief(plan.effective)} samples a step, not the {brief(plan.target)} "
            f"asked for: {plan.world_size} equal ranks cannot make that, and this is "
            f"nearest"
        )
    return [
        ("micro-batch", f"{_counted(plan.micro_batch, 'sample')} on each rank"),
        ("accumulation", _counted(plan.accumulate, "micro-batch")),
        ("ranks", f"{plan.world_size}"),
        ("effective batch", verdict),
    ]


def _about(epoch: Epoch) -> list[Row]:
    """How many steps an epoch has, and how full its last one is."""
    micro_batches = _counted(epoch.num_micro_batches, "micro-batch")
    steps = _counted(epoch.num_steps, "optimizer step")
    last = f"{brief(epoch.last_window_samples)} samples" if epoch.is_short else "full"
    return [
        ("epoch", f"{steps}, {micro_batches} on each rank"),
        ("last window", last),
    ]


def _about_noise(scale: NoiseEstimate, plan: BatchPlan) -> list[Row]:
    """The noise scale, and what the planned window is worth by it."""
    _, window = advice(replace(scale, window=float(plan.effective)))
    said = f"{short(scale.samples)} samples; an estimate, good to about a factor of 2"
    return [("noise scale", said), window]


def _counted(number: int, thing: str) -> str:
    """A number and what it counts.

    >>> _counted(1, "micro-batch"), _counted(12000, "micro-batch"), _counted(2, "row")
    ('1 micro-batch', '12,000 micro-batches', '2 rows')
    """
    ending = "es" if thing.endswith("ch") else "s"
    return f"{number:,} {thing}{ending if number != 1 else ''}"


def _parse(argv: list[str]) -> argparse.Namespace:
    about = "Micro-batch and accumulation for the effective batch you mean."
    parser = Arguments(prog="trainkit plan", description=about, epilog=EXAMPLE)
    add = parser.add_argument_group("the batch").add_argument
    add("--target", type=int, required=True, help="samples of one optimizer step")
    most = "the most samples that fit into a rank's forward pass, or that --probe tries"
    add("--max-micro-batch", type=int, help=most)
    add("--world-size", type=int, help="data-parallel ranks (default 1)")
    add("--dataset-size", type=int, help="samples in the data set, to count an epoch")
    add = parser.add_argument_group("the learning rate").add_argument
    add("--lr", type=_positive, help="the rate for the reference batch")
    add("--reference", type=int, help="the effective batch to which --lr belongs")
    noise = "the gradient noise scale, or a run that has measured it with NoiseScale"
    where = "SAMPLES|RUN_FOLDER"
    add("--noise-scale", metavar=where, help=noise)
    add = parser.add_argument_group("measured sizes").add_argument
    probe = (
        "build what `trainkit train OVERRIDES` trains, and find the largest size that "
        "fits with its data, on all of its ranks"
    )
    add("--probe", action="store_true", help=probe)
    words: Any = add("overrides", nargs="*", help="with --probe, as for trainkit train")
    words.completer = like
    for short_name, name in zip(
        ("-cd", "-cn", "-cp"), (CONFIG_DIR, CONFIG_NAME, CONFIG_PATH), strict=True
    ):
        add(short_name, name, help="as for trainkit train")
    parser.add_argument("--json", action="store_true", help="print the data of it all")
    args = parser.parse_intermixed_args(argv)
    _refuse_what_lacks(args)
    if args.noise_scale is not None:
        args.noise_scale = _noise_scale(args.noise_scale)
    return args


def _refuse_what_lacks(args: argparse.Namespace) -> None:
    """Refuse an option that has no meaning without another one."""
    needs = [
        ("--lr", args.lr, "--reference", args.reference),
        ("--reference", args.reference, "--lr", args.lr),
        ("OVERRIDES", args.overrides or None, "--probe", args.probe or None),
    ]
    if not args.probe:
        needs.append(("--target", 1, "--max-micro-batch", args.max_micro_batch))
    for option, value, needed, there in needs:
        if value is not None and there is None:
            raise TrainkitError(
                f"trainkit plan {option}: needs {needed}, which is missing, received "
                f"{value!r}. Add it."
            )
    if args.probe and args.world_size is not None:
        raise TrainkitError(
            "trainkit plan --world-size: --probe takes the ranks of the Trainer it "
            "builds. Write trainer.devices=... and trainer.num_nodes=... instead."
        )


def _positive(text: str) -> float:
    value = float(text)
    if not is_positive_number(value):
        raise argparse.ArgumentTypeError(f"must be above 0, received {value}")
    return value


def _noise_scale(text: str) -> NoiseEstimate:
    """The noise scale of a run, or a number, which is good to a factor of 2."""
    try:
        samples = _positive(text)
    except (ValueError, argparse.ArgumentTypeError):
        return read_noise_scale(text)
    return NoiseEstimate(samples, samples / 2, samples * 2, samples, 1.0, 0)
