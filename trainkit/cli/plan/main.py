"""`trainkit plan`: micro-batch and accumulation for the effective batch you mean."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from trainkit.cli.arguments import Arguments
from trainkit.cli.completion import like, places_in
from trainkit.cli.plan.report import (
    BY_NOISE,
    Reference,
    Scale,
    describe,
    make_report,
    table,
)
from trainkit.cli.printing import say_loading
from trainkit.cli.training_words import aside, composed
from trainkit.cli.words import CONFIG_DIR, CONFIG_NAME, CONFIG_PATH
from trainkit.core.noise.from_run import read_noise_scale
from trainkit.core.plan.effective_batch import BatchPlan
from trainkit.core.plan.options import check_size, is_positive_number
from trainkit.core.plan.scaling import RULES
from trainkit.errors import TrainkitError
from trainkit.lit.callback.table import show

if TYPE_CHECKING:
    from trainkit.lit.probe.find import FoundMicroBatch

PLACES = {"-cd": CONFIG_DIR, "-cn": CONFIG_NAME, "-cp": CONFIG_PATH}
"""Hydra's options for the places of configurations, which --probe passes on."""

EXAMPLE = """\
example:
  trainkit plan --target 512 --world-size 4 --max-micro-batch 24 \\
      --dataset-size 50000 --lr 0.1 --reference 256 --rule linear
  trainkit plan --target 512 --max-micro-batch 24 --noise-scale outputs/MyModule/...
  trainkit plan --probe --target 512 model=mine trainer=gpu
"""


_NEEDS = {
    "lr": "reference",
    "reference": "lr",
    "rule": "lr",
    "betas": "lr",
    "eps": "lr",
    "drop_last": "dataset_size",
}
"""Options that have no meaning without another one."""


def main(argv: list[str]) -> int:
    """Run `trainkit plan`, and return the exit status."""
    args = _parse(argv)
    found = None
    if "probe" in args:
        found = _probed(args)
        if found is None:
            return 0  # only the first rank prints
        plan = found.plan
    else:
        plan = BatchPlan.make(
            target=args.target,
            world_size=args.world_size or 1,
            max_micro_batch=args.max_micro_batch,
        )
    epoch = reference = None
    if args.dataset_size is not None:
        epoch = plan.epoch(args.dataset_size, drop_last=args.drop_last)
    if args.lr is not None:
        check_size("trainkit plan --reference", args.reference)
        adam = {"betas": args.betas or (0.9, 0.999), "eps": args.eps or 1e-8}
        reference = Reference(batch=args.reference, lr=args.lr, **adam)
    report = make_report(
        plan,
        epoch=epoch,
        reference=reference,
        rule=args.rule,
        noise_scale=args.noise_scale,
        words=() if found is None else args.overrides,
    )
    report["trials"] = None if found is None else [asdict(t) for t in found.trials]
    if args.json:
        print(json.dumps(report, indent=2))
        return 0
    show([*([] if found is None else found.tried()), *describe(report)])
    if args.noise_scale is not None:
        print("\n".join(table(report)))
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
        config = composed([*places_in(args), *args.overrides], folder)
        _refuse_without_key(config.data or {})
        training = build(config)
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


def _refuse_without_key(data: Any) -> None:
    """Refuse a configuration that cannot take the size as an override."""
    if "batch_size" not in data:
        names = ", ".join(key for key in map(str, data) if not key.startswith("_"))
        raise TrainkitError(
            f"trainkit plan --probe: needs data.batch_size, the size of the training "
            f"loader's batches, and the configuration's data has {names or 'none'}. "
            f"Give the data module an argument batch_size, and name it in its "
            f"configuration."
        )


def _parse(argv: list[str]) -> argparse.Namespace:
    # Without --probe an override is a mistake, and the parser must say so.
    probes = not {"--probe", "--help", "-h"}.isdisjoint(argv)
    parser = Arguments(
        prog="trainkit plan",
        description="Micro-batch and accumulation for the effective batch you mean.",
        epilog=EXAMPLE,
    )
    add = parser.add_argument_group("the batch").add_argument
    add("--target", type=int, required=True, help="samples of one optimizer step")
    most = (
        "the most samples that fit into one rank's forward pass, or that --probe tries"
    )
    add("--max-micro-batch", type=int, required=not probes, help=most)
    add("--world-size", type=int, help="data-parallel ranks (default 1)")
    if probes:
        _add_probe(parser)
    add = parser.add_argument_group("the epoch").add_argument
    add("--dataset-size", type=int, help="samples in the data set")
    short = "the loader leaves out a last micro-batch that is not full"
    add("--drop-last", action="store_true", help=short)
    add = parser.add_argument_group("the learning rate").add_argument
    add("--lr", type=positive, help="the rate for the reference batch")
    add("--reference", type=int, help="the effective batch to which --lr belongs")
    only = "one rule only (default: all of them)"
    add("--rule", choices=[*RULES, BY_NOISE], help=only)
    betas = "Adam's, for the rules that change them (default 0.9 0.999)"
    add("--betas", type=share, nargs=2, help=betas)
    add("--eps", type=positive, help="Adam's (default 1e-08)")
    noise = (
        "the gradient noise scale, or a run that has measured it with NoiseScale: a "
        "table of windows with the progress of a step and of a sample, the time on one "
        "device, the speed of --world-size devices, and the rates by the rule gain"
    )
    where = "SAMPLES|RUN_FOLDER"
    add("--noise-scale", type=_noise_scale, metavar=where, help=noise)
    parser.add_argument("--json", action="store_true", help="print the data of it all")
    args = parser.parse_intermixed_args(argv)
    _refuse_what_lacks(args)
    return args


def _refuse_what_lacks(args: argparse.Namespace) -> None:
    for option, needed in _NEEDS.items():
        lacks = getattr(args, needed) is None
        if lacks and getattr(args, option) not in (None, False):
            option, needed = (name.replace("_", "-") for name in (option, needed))
            raise TrainkitError(
                f"trainkit plan --{option}: needs --{needed}, which is missing. Add it."
            )
    if args.rule == BY_NOISE and args.noise_scale is None:
        raise TrainkitError(
            "trainkit plan --rule gain: needs --noise-scale, which is missing. Add a "
            "number of samples, or the folder of a run that has measured it."
        )
    if "probe" in args and args.world_size is not None:
        raise TrainkitError(
            "trainkit plan --world-size: --probe takes the ranks of the Trainer it "
            "builds. Write trainer.devices=... and trainer.num_nodes=... instead."
        )


def _add_probe(parser: Arguments) -> None:
    add = parser.add_argument_group("measured sizes").add_argument
    probe = (
        "build what `trainkit train OVERRIDES` trains, and find the largest size that "
        "fits with its data, on all of its ranks"
    )
    add("--probe", action="store_true", help=probe)
    words: Any = add("overrides", nargs="*", help="as for trainkit train")
    words.completer = like
    for short, long in PLACES.items():
        add(short, long, help="as for trainkit train")


def positive(text: str) -> float:
    value = float(text)
    if not is_positive_number(value):
        raise argparse.ArgumentTypeError(f"must be above 0, received {value}")
    return value


def share(text: str) -> float:
    if positive(text) >= 1:
        raise argparse.ArgumentTypeError(f"must be below 1, received {text}")
    return float(text)


def _noise_scale(text: str) -> Scale:
    """Reads the noise scale: `samples`, and of a run `low` and `high`.

    >>> _noise_scale("210")
    {'samples': 210.0, 'low': None, 'high': None}
    """
    try:
        return {"samples": positive(text), "low": None, "high": None}
    except (ValueError, argparse.ArgumentTypeError):
        pass
    try:
        found = read_noise_scale(text)
    except TrainkitError as error:
        said = str(error).removeprefix("noise_scale: ").rstrip(".")
        raise argparse.ArgumentTypeError(said) from error
    return {"samples": found.samples, "low": found.low, "high": found.high}
