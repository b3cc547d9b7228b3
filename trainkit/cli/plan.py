"""`trainkit plan`: micro-batch and accumulation for the effective batch you mean."""

from __future__ import annotations

import argparse
import json

from trainkit.cli.arguments import Arguments
from trainkit.cli.plan_report import describe, make_report
from trainkit.cli.plan_scaling import BETAS, EPS, Reference, scaled_by_rules
from trainkit.core.batch_plan import BatchPlan
from trainkit.core.scaling import RULES
from trainkit.errors import TrainkitError
from trainkit.lit.plan import show

EXAMPLE = """\
example:
  trainkit plan --target 512 --world-size 4 --max-micro-batch 24 \\
      --dataset-size 50000 --lr 0.1 --reference 256 --rule linear

keys of --json, each always there:
  target world_size max_micro_batch    as asked for
  micro_batch accumulate effective     the plan; exact: whether effective is target
  nearby        micro_batch accumulate effective of a plan within 5 % that needs at
                most half as many micro-batches, or null
  epoch         num_samples samples_per_rank num_repeated_samples num_dropped_samples
                num_micro_batches num_steps last_window_micro_batches
                last_window_samples is_short; null without --dataset-size
  scaling       a list of rule k lr beta1 beta2 eps problem; beta1, beta2 and eps are
                null where they stay as they are, lr is null where there is a problem;
                null without --lr
  overrides     train (Hydra) and fit (Lightning CLI), lists of arguments
"""


def main(argv: list[str]) -> int:
    """Run `trainkit plan`.

    Args:
        argv: the arguments after `plan`.

    Returns:
        The exit status, 0.

    Raises:
        TrainkitError: an argument is wrong or missing.
    """
    args = _parse(argv)
    plan = BatchPlan.make(
        target=args.target,
        world_size=args.world_size,
        max_micro_batch=args.max_micro_batch,
    )
    epoch = scaling = None
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
    report = make_report(plan, epoch, scaling, rule=args.rule, reference=args.reference)
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        show(describe(report))
    return 0


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = Arguments(
        prog="trainkit plan",
        description="Micro-batch and accumulation for the effective batch you mean.",
        epilog=EXAMPLE,
    )
    batch = parser.add_argument_group("the batch")
    batch.add_argument(
        "--target", type=int, required=True, help="samples that one optimizer step sees"
    )
    batch.add_argument(
        "--max-micro-batch",
        type=int,
        required=True,
        help="the most samples that fit into one rank's forward pass",
    )
    batch.add_argument(
        "--world-size", type=int, default=1, help="data-parallel ranks (default 1)"
    )
    _add_epoch(parser)
    _add_scaling(parser)
    parser.add_argument("--json", action="store_true", help="print JSON, keys below")
    args = parser.parse_args(argv)
    _refuse_lonely(args)
    return args


def _add_epoch(parser: Arguments) -> None:
    epoch = parser.add_argument_group("the epoch")
    epoch.add_argument("--dataset-size", type=int, help="samples in the data set")
    epoch.add_argument(
        "--drop-last",
        action="store_true",
        help="the loader leaves out a last micro-batch that is not full",
    )


def _add_scaling(parser: Arguments) -> None:
    scaling = parser.add_argument_group("the learning rate")
    scaling.add_argument("--lr", type=float, help="the rate for the reference batch")
    scaling.add_argument(
        "--reference", type=int, help="the effective batch that --lr is meant for"
    )
    scaling.add_argument(
        "--rule", choices=list(RULES), help="one rule only (default: all of them)"
    )
    scaling.add_argument(
        "--betas",
        type=float,
        nargs=2,
        help=f"Adam's, for the rules that change them (default {BETAS[0]} {BETAS[1]})",
    )
    scaling.add_argument("--eps", type=float, help=f"Adam's (default {EPS:g})")


def _refuse_lonely(args: argparse.Namespace) -> None:
    """Options that mean nothing without another one."""
    given = {
        "--lr": args.lr is not None,
        "--reference": args.reference is not None,
        "--rule": args.rule is not None,
        "--betas": args.betas is not None,
        "--eps": args.eps is not None,
        "--dataset-size": args.dataset_size is not None,
        "--drop-last": args.drop_last,
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
        if given[option] and not given[needed]:
            raise TrainkitError(f"trainkit plan {option}: needs {needed} beside it.")
