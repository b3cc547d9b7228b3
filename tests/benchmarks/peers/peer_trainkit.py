"""trainkit: Lightning's streamed windows, and loader batches cut by length."""

from __future__ import annotations

from tests.benchmarks.peers.peer_lightning import Module, trainer
from tests.benchmarks.peers.work import IGNORED, CausalNet, Work
from trainkit import (
    AccumulationMixin,
    MicroBatching,
    PadCollate,
    PerToken,
    ResumableLoader,
    WeighNothing,
)

PACKAGES = ("lightning-trainkit", "lightning")


class Exact(AccumulationMixin, Module):
    accumulation = PerToken(shift=True)


def train(work: Work, net: CausalNet) -> None:
    """`accumulate_grad_batches`, as in plain Lightning."""
    loader = load(work, work.micro_batch)
    trainer(work, work.accumulate).fit(Exact(work, net), loader)


def train_split(work: Work, net: CausalNet) -> None:
    """Windows cut by length, in no more memory than rows in their order may need."""
    module = Exact(work, net)
    module.micro_batching = MicroBatching(tokens=work.micro_batch * work.longest)
    loader = load(work, work.window // work.world_size)
    trainer(work, accumulate=1).fit(module, loader)


def load(work: Work, batch_size: int) -> ResumableLoader:
    """Over the ranks too; a rank with no row left reads one that weighs nothing."""
    rows = [{"input_ids": row, "labels": row} for row in work.rows]
    return ResumableLoader(
        rows,
        batch_size,
        collate_fn=PadCollate({"labels": IGNORED}),
        weigh_nothing=WeighNothing(labels=IGNORED),
    )


VARIANTS = {"trainkit": train, "trainkit, split windows": train_split}
