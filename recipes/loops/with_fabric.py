"""A Fabric loop on two processes: ragged rows, unequal ranks, one exact step.

    python recipes/loops/with_fabric.py

The ranks hold different numbers of tokens. DDP averages them as if they were alike;
`Accumulator` reads from the module what DDP does, and the step is the big batch's.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric import Fabric
from plain import WINDOW, apart, collate, new_model, read_rows, train
from torch.nn.functional import cross_entropy

from trainkit import Accumulator, PerToken


def train_on_ranks(fabric: Any, micro_batch: int, epochs: int = 3) -> Any:
    """Train in windows of 16 rows over all ranks, `micro_batch` of them at a time."""
    rows = read_rows()
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = fabric.setup(model, optimizer)
    accumulator = Accumulator(PerToken("labels"), module=model)
    for epoch in range(epochs):
        order = torch.randperm(
            len(rows), generator=torch.Generator().manual_seed(epoch)
        )
        for window in order.split(WINDOW):
            own = window.tensor_split(fabric.world_size)[fabric.global_rank]
            for part in own.split(micro_batch):
                batch = collate([rows[i] for i in part])
                logits = model(batch["ids"])
                loss = cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
                accumulator.backward(loss, batch, backward=fabric.backward)
            accumulator.finish(optimizer)
            optimizer.step()
            optimizer.zero_grad()
    accumulator.check()
    return model.module


if __name__ == "__main__":
    big = train(micro_batch=WINDOW)  # in one process
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    found = train_on_ranks(fabric, micro_batch=4)
    fabric.print(f"two ranks: {apart(found, big):.0e} from the big batch")
