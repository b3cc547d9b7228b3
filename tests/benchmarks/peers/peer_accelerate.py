"""Accelerate: `accumulate`, and the recipe of its documentation for language models."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

from accelerate import Accelerator
from torch.utils.data import DataLoader

from tests.benchmarks.peers.work import IGNORED, CausalNet, Work, loss_of, pad

PACKAGES = ("accelerate",)


def prepare(work: Work, net: CausalNet) -> tuple[Accelerator, Any, Any, Any]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=work.accumulate)
    rows: Any = work.rows
    parts = (
        net,
        work.make_optimizer(net.parameters()),
        DataLoader(rows, work.micro_batch, collate_fn=pad),
    )
    return accelerator, *accelerator.prepare(*parts)


def train(work: Work, net: CausalNet) -> None:
    """https://huggingface.co/docs/accelerate/usage_guides/gradient_accumulation."""
    accelerator, model, optimizer, loader = prepare(work, net)
    for batch in loader:
        with accelerator.accumulate(model):
            loss = loss_of(model(batch["input_ids"]), batch["labels"])
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()


def train_by_recipe(work: Work, net: CausalNet) -> None:
    """`gradient_accumulation_for_autoregressive_models.py` of its examples: tokens are
    counted by hand, over the ranks too, and Accelerate's own division is undone."""
    accelerator, model, optimizer, loader = prepare(work, net)
    batches = iter(loader)
    while window := list(itertools.islice(batches, work.accumulate)):
        counts = [(batch["labels"][:, 1:] != IGNORED).sum() for batch in window]
        total = accelerator.gather(sum(counts)).sum().item()  # type: ignore[union-attr]
        for number, batch in enumerate(window, start=1):
            is_last = number == len(window)
            waits = accelerator.num_processes > 1 and not is_last
            with model.no_sync() if waits else contextlib.nullcontext():
                logits = model(batch["input_ids"])
                loss = loss_of(logits, batch["labels"], "sum")
                factor = work.accumulate * accelerator.num_processes
                accelerator.backward(loss * factor / total)
        optimizer.step()
        optimizer.zero_grad()


VARIANTS = {"Accelerate": train, "Accelerate, counting by hand": train_by_recipe}
