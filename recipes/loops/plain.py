"""A plain PyTorch loop: ragged micro-batches, and each step exactly the big batch's.

    python recipes/loops/plain.py

Rows are sequences of different lengths, so micro-batches hold different numbers of
tokens. `Accumulator` weighs each by its own, and divides the window once.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from trainkit import AccumulationStrategy, Accumulator, PerToken, Uniform

WINDOW = 16
"""The rows of an optimizer step."""

VOCABULARY = 50


def read_rows(number: int = 100) -> list[Tensor]:
    """Sequences of 3 to 40 tokens, in which a token hints at the next one."""
    draw = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(number):
        length = int(torch.randint(3, 41, (), generator=draw))
        steps = torch.randint(1, 4, (length,), generator=draw)
        rows.append(steps.cumsum(0) % VOCABULARY)
    return rows


def collate(rows: list[Tensor]) -> dict[str, Tensor]:
    """Token ids, and for each the next one as its label; -100 where there is none."""
    ids = pad_sequence([row[:-1] for row in rows], batch_first=True)
    labels = pad_sequence(
        [row[1:] for row in rows], batch_first=True, padding_value=-100
    )
    return {"ids": ids, "labels": labels}


def new_model() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Embedding(VOCABULARY, 32), nn.Linear(32, VOCABULARY)
    return nn.Sequential(*layers).double()


COUNTS = PerToken("labels")
"""A micro-batch weighs the labels that its mean loss was divided by."""


def train(
    micro_batch: int, strategy: AccumulationStrategy = COUNTS, epochs: int = 3
) -> nn.Module:
    """Train in windows of 16 rows, of which `micro_batch` run at a time."""
    rows, model = read_rows(), new_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    accumulator = Accumulator(strategy, module=model)
    for epoch in range(epochs):
        order = torch.randperm(
            len(rows), generator=torch.Generator().manual_seed(epoch)
        )
        for window in order.split(WINDOW):  # the last one of an epoch is short
            for part in window.split(micro_batch):
                batch = collate([rows[i] for i in part])
                logits = model(batch["ids"])
                loss = cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
                accumulator.backward(loss, batch)  # in place of loss.backward()
            accumulator.finish(optimizer)  # the gradients are now the big batch's
            optimizer.step()
            optimizer.zero_grad()
    accumulator.check()
    return model


def apart(one: nn.Module, other: nn.Module) -> float:
    """The distance of the weights, as a share of the distance travelled."""
    ours, theirs, first = (
        nn.utils.parameters_to_vector(each.parameters()).detach()
        for each in (one, other, new_model())
    )
    return float((ours - theirs).norm() / (theirs - first).norm())


if __name__ == "__main__":
    big = train(micro_batch=WINDOW)
    for size in (1, 3, 8):
        ours, plain = apart(train(size), big), apart(train(size, Uniform()), big)
        print(f"{size} rows at a time: {ours:.0e} from the big batch")
        print(f"{size} rows at a time, all weighed alike: {plain:.0%}")
