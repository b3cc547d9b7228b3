"""`trainkit plan`: micro-batch and accumulation for the effective batch you mean."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from trainkit.cli.arguments import Arguments
from trainkit.cli.completion import overrides
from trainkit.cli.loading import say_loading
from trainkit.cli.plan import noise
from trainkit.cli.plan.report import describe, make_report
from trainkit.cli.plan.scaling import BETAS, BY_NOISE, EPS, Reference, scaled_by_rules
from trainkit.cli.words import CONFIG_DIR, CONFIG_NAME, CONFIG_PATH
from trainkit.core.plan.effective_batch import BatchPlan
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

keys of --json, none of which is ever missing:
  target world_size max_micro_batch    the request
  micro_batch accumulate effective     the plan
  exact         whether effective is target
  nearby        micro_batch accumulate effective of a plan within 5 % that needs at
                most half as many micro-batches, or null
  epoch         num_samples samples_per_rank num_repeated_samples num_dropped_samples
                num_micro_batches num_steps last_window_micro_batches
                last_window_samples is_short; null without --dataset-size
  scaling       a list of rule k lr beta1 beta2 eps problem; beta1, beta2 and eps are
                null if they do not change, lr is null if there is a problem; null
                without --lr; of the rule gain the rates are in windows
  noise_scale   samples low high; low and high are null if a number was given; null
                without --noise-scale
  windows       a list of window plan per_step per_sample time speed gain lr_sgd
                lr_adam; plan: whether it is the plan's; per_step: progress as a share
                of an endless window's; per_sample: as a share of a tiny window's;
                time: to equal progress on one device, and its samples, in times those
                of tiny windows, 1 / per_sample; speed: of world_size devices, in times
                that of one with tiny windows, min(world_size, window) x per_sample,
                if nothing is lost between them; gain, lr_sgd and lr_adam: rates x
                gain and x its root, null without --lr; null without --noise-scale
  overrides     train (Hydra) and fit (Lightning CLI), lists of arguments
  trials        a list of size fits samples_per_second peak_bytes, of one rank;
                null without --probe
"""


def main(argv: list[str]) -> int:
    """Run `trainkit plan`, and return the exit status."""
    args = _parse(argv)
    scale = None if args.noise_scale is None else noise.read(args.noise_scale)
    probes = "probe" in args
    found = _probed(args) if probes else None
    if probes and found is None:
        return 0  # only the first rank prints
    if found is not None:
        plan = found.plan
    else:
        plan = BatchPlan.make(
            target=args.target,
            world_size=args.world_size or 1,
            max_micro_batch=args.max_micro_batch,
        )
    epoch = scaling = reference = None
    if args.dataset_size is not None:
        epoch = plan.epoch(args.dataset_size, drop_last=args.drop_last)
    if args.lr is not None:
        reference = Reference(
            batch=args.reference,
            lr=args.lr,
            betas=tuple(args.betas or BETAS),
            eps=EPS if args.eps is None else args.eps,
        )
        scaling = scaled_by_rules(plan, reference, rule=args.rule)
    words = args.overrides if probes else ()
    report = make_report(
        plan,
        epoch,
        scaling,
        rule=args.rule,
        reference=reference,
        words=words,
        noise_scale=scale,
    )
    report["trials"] = None if found is None else [asdict(t) for t in found.trials]
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        show([*([] if found is None else found.tried()), *describe(report)])
        if scale is not None:
            print("\n".join(noise.table(report)))
    return 0


def _probed(args: argparse.Namespace) -> FoundMicroBatch | None:
    say_loading("plan", ["--json"] if args.json else [])
    from trainkit.cli.plan.probe import probe  # loads torch and lightning

    return probe(
        [*overrides.places_in(args), *args.overrides],
        target=args.target,
        max_micro_batch=args.max_micro_batch,
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
    add(
        "--max-micro-batch",
        type=int,
        required=not probes,
        help="the most samples that fit into one rank's forward pass; with --probe, "
        "the most to try",
    )
    add("--world-size", type=int, help="data-parallel ranks (default 1)")
    if probes:
        _add_probe(parser)
    _add_epoch(parser)
    _add_scaling(parser)
    parser.add_argument("--json", action="store_true", help="print JSON, keys below")
    args = parser.parse_intermixed_args(argv)
    _refuse_lonely(args)
    _refuse_beside_probe(args)
    return args


def _add_probe(parser: Arguments) -> None:
    probe = parser.add_argument_group("measured sizes")
    probe.add_argument(
        "--probe",
        action="store_true",
        help="build what `trainkit train OVERRIDES` trains, and measure memory and "
        "speed of several sizes with its data, on all of its ranks",
    )
    words: Any = probe.add_argument(
        "overrides", nargs="*", help="as for trainkit train"
    )
    words.completer = overrides.like
    for short, long in PLACES.items():
        probe.add_argument(short, long, help="as for trainkit train")


def _add_epoch(parser: Arguments) -> None:
    add = parser.add_argument_group("the epoch").add_argument
    add("--dataset-size", type=int, help="samples in the data set")
    short = "the loader leaves out a last micro-batch that is not full"
    add("--drop-last", action="store_true", help=short)


def _add_scaling(parser: Arguments) -> None:
    add = parser.add_argument_group("the learning rate").add_argument
    add("--lr", type=float, help="the rate for the reference batch")
    add("--reference", type=int, help="the effective batch to which --lr belongs")
    rules = [*RULES, BY_NOISE]
    add("--rule", choices=rules, help="one rule only (default: all of them)")
    betas = f"Adam's, for the rules that change them (default {BETAS[0]} {BETAS[1]})"
    add("--betas", type=float, nargs=2, help=betas)
    add("--eps", type=float, help=f"Adam's (default {EPS:g})")
    add(
        "--noise-scale",
        metavar="SAMPLES|RUN_FOLDER",
        help="the gradient noise scale, or a run that has measured it with NoiseScale: "
        "a table of windows with the progress of a step and of a sample, the time on "
        "one device, the speed of --world-size devices, and the rates by the rule "
        "gain: x gain for SGD, x its root for Adam, where gain = (1 + scale / "
        "reference) / (1 + scale / window)",
    )


def _refuse_beside_probe(args: argparse.Namespace) -> None:
    if "probe" in args and args.world_size is not None:
        raise TrainkitError(
            "trainkit plan --world-size: --probe takes the ranks of the Trainer it "
            "builds. Write trainer.devices=... and trainer.num_nodes=... instead."
        )


def _refuse_lonely(args: argparse.Namespace) -> None:
    """Refuse options that have no meaning without another one."""
    given = {
        f"--{name.replace('_', '-')}"
        for name, value in vars(args).items()
        if value is not None and value is not False
    }
    needs = {
        "--lr": "--reference",
        "--reference": "--lr",
        "--rule": "--lr",
        "--betas": "--lr",
        "--eps": "--lr",
        "--drop-last": "--dataset-size",
    }
    for option, needed in needs.items():
        if option in given and needed not in given:
            raise TrainkitError(
                f"trainkit plan {option}: needs {needed}, which is missing. Add it."
            )
    if args.rule == BY_NOISE and args.noise_scale is None:
        raise TrainkitError(
            "trainkit plan --rule gain: needs --noise-scale, which is missing. Add a "
            "number of samples, or the folder of a run that has measured it."
        )
