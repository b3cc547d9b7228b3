"""A recipe's training, small and short; and the gradient of its window."""

from __future__ import annotations

import copy
import csv
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from recipes.apart import off_by, weights_at_end, weights_at_start
from tests.cli.training import summary_of
from tests.helpers import TOLERANCE, gradients
from trainkit import AccumulationStrategy, Accumulator

SMALL = {
    "batch_size": "data.max_length=16 data.num_train=320 data.num_val=32 "
    "model.d_model=8 model.num_layers=1",
    "code_lm": "data.vocab_size=300 data.num_train=128 data.num_val=16 "
    "data.max_length=64 model.d_model=16 model.num_layers=1",
    "completions": "data.vocab_size=300 data.num_train=64 data.num_val=8 "
    "data.max_length=96 model.hidden_size=16 model.num_layers=1 model.num_heads=1",
    "contrastive": "data.batch_size=32 data.num_train=64 data.num_val=32 model.width=4 "
    "micro_batching.size=8",
    "digits_bn": "data.num_train=34 data.num_val=32 model.width=4 "
    "schedule.sizes={0:4,4:2,6:1}",
    "gan": "data.batch_size=8 data.num_train=42 data.num_val=16 model.width=8",
    "masked_lm": "data.tokens=200 data.vocab_size=300 data.num_train=20 data.num_val=8 "
    "data.max_length=64 model.hidden_size=16 model.num_layers=1 model.num_heads=1",
    "moe": "data.batch_size=16 data.length=16 data.num_train=64 data.num_val=16 "
    "model.width=8 model.num_heads=2 model.num_experts=4",
    "multi_term": "data.batch_size=16 data.num_train=64 data.num_val=16 model.width=8",
    "packed_lm": "data.vocab_size=300 data.num_train=64 data.num_val=8 "
    "data.max_length=96 data.batch_size=32 model.hidden_size=16 model.num_layers=1 "
    "model.num_heads=1 micro_batching.tokens=900",
    "ragged_regression": "data.num_train=58 data.num_val=16 model.width=4",
    "segmentation": "data.batch_size=8 data.num_train=28 data.num_val=8 data.side=16 "
    "model.width=2 micro_batching.size=3",
}
"""Words with which a recipe's training takes no time."""

QUICK = ["report=false", "callbacks.best=null"]


def small(name: str, *, epochs: int | None = None) -> list[str]:
    """The words of a recipe's small training.

    Args:
        name: of the recipe.
        epochs: how many to train; None takes a few steps, as `debug=default` does.
    """
    # Anomalies are looked for by a stack of a hundred calls at each operation.
    end = ["debug=default", "trainer.detect_anomaly=false"] if epochs is None else [
        f"trainer.max_epochs={epochs}",
        "trainer.val_check_interval=1.0",
        "trainer.check_val_every_n_epoch=1",
        "trainer.log_every_n_steps=1",
    ]  # fmt: skip
    return [f"experiment={name}", *SMALL[name].split(), *end]


def metrics_of(run: Path) -> dict[str, Any]:
    """Those of a run's end; it has logged rows."""
    with (run / "metrics.csv").open() as file:
        assert list(csv.DictReader(file))
    return summary_of(run)["metrics"]


def off_the_first(big: Path, *others: Path) -> list[float]:
    """How far runs ended from the first, as shares of the way that it went."""
    start, end = weights_at_start(big), weights_at_end(big)
    assert not start.equal(end)
    return [off_by(weights_at_end(other), end, start) for other in others]


# ---- the gradient of a window, against that of its rows as one batch -----------------


EXACT = TOLERANCE[torch.float64]


def window_gradient(
    module: nn.Module, loss_of: Any, batches: list[Any], strategy: Any
) -> Tensor:
    """Of micro-batches, weighed by a strategy or by one for each term."""
    module = copy.deepcopy(module)
    accumulator = Accumulator(strategy)
    if isinstance(strategy, dict):
        accumulator.expect(batches)
    for batch in batches:
        accumulator.backward(loss_of(module, batch), batch)
    accumulator.finish(list(module.parameters()))
    return gradients(module)


def whole_gradient(module: nn.Module, loss_of: Any, batch: Any) -> Tensor:
    """Of one batch, by autograd alone."""
    module = copy.deepcopy(module)
    loss = loss_of(module, batch)
    terms = list(loss.values()) if isinstance(loss, dict) else [loss]
    torch.stack(terms).sum().backward()
    return gradients(module)


def off(gradient: Tensor, reference: Tensor) -> float:
    """The distance as a share of the reference's norm."""
    return float((gradient - reference).norm() / reference.norm())


def joined(batches: list[Any]) -> Any:
    """The rows of micro-batches, which are equally long, as one batch."""
    first = batches[0]
    if isinstance(first, dict):
        return {name: torch.cat([batch[name] for batch in batches]) for name in first}
    return [torch.cat(parts) for parts in zip(*batches, strict=True)]


def doubled(batch: Any) -> Any:
    """A batch in float64."""
    if isinstance(batch, dict):
        return {name: doubled(value) for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        return [doubled(value) for value in batch]
    return batch.double() if torch.is_floating_point(batch) else batch


def alone(module: LightningModule) -> LightningModule:
    """A module in float64 whose step runs without a Trainer: in one process."""
    module.all_gather = lambda data, **_: data  # type: ignore[method-assign]
    module.log = lambda *_, **__: None  # type: ignore[method-assign]
    return module.double()


def window_is_off_by(
    module: LightningModule,
    strategy: AccumulationStrategy,
    rows: Sequence[Any],
    collate: Callable[[Any], Any],
    *,
    cuts: Sequence[int],
) -> float:
    """How far a window of rows that are collated in these cuts is from one batch."""
    batches = [collate(part) for part in parts_of(rows, cuts)]
    return off(
        window_gradient(module, step_of, batches, strategy),
        whole_gradient(module, step_of, collate(rows)),
    )


def step_of(module: Any, batch: Any) -> Any:
    return module.training_step(batch, 0)


def parts_of(rows: Sequence[Any], cuts: Sequence[int]) -> list[Sequence[Any]]:
    assert sum(cuts) == len(rows)
    ends = [0, *accumulate(cuts)]
    return [rows[a:b] for a, b in zip(ends, ends[1:], strict=False)]
