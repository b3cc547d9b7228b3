"""`TokenLoss` beside whole logits and an inner cut: peak of live bytes, and time.

    python -m tests.benchmarks.token_loss

The times are medians of rounds in which the ways take turns, as shares of whole logits.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.benchmarks.measuring import LiveBytes, asked, table
from trainkit import Chunked, TokenLoss

WORDS, WIDTH, SIZE = 16_000, 128, 256


class PerToken(nn.Module):
    """The loss of each token, which an inner cut runs in chunks, twice."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(hidden), labels, reduction="none")


def ways(tokens: int) -> dict[str, Callable[[], Tensor]]:
    """Each makes the gradients of the same tokens, and returns the loss."""
    torch.manual_seed(0)
    head, hidden = nn.Linear(WIDTH, WORDS, bias=False), torch.randn(tokens, WIDTH)
    labels = torch.randint(WORDS, (tokens,))
    chunked, loss = PerToken(head), TokenLoss(head, size=SIZE)
    Chunked(chunked, size=SIZE)

    def of(make: Callable[[Tensor], Tensor]) -> Callable[[], Tensor]:
        def run() -> Tensor:
            head.zero_grad()
            found = make(hidden.clone().requires_grad_())
            found.backward()
            return found.detach()

        return run

    return {
        "whole logits": of(lambda states: F.cross_entropy(head(states), labels)),
        f"TokenLoss(size={SIZE})": of(lambda states: loss(states, labels)),
        f"inner cut, size={SIZE}": of(lambda states: chunked(states, labels).mean()),
    }


def main() -> None:
    options = asked(__doc__, tokens=2048, rounds=7)
    torch.set_num_threads(1)
    made = ways(options.tokens)
    first, peaks = next(iter(made.values()))(), {}
    for name, run in made.items():
        with LiveBytes() as live:
            torch.testing.assert_close(run(), first)
        peaks[name] = live.peak / 2**20
    times: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(options.rounds):
        for name, run in made.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    print(f"{options.tokens} tokens, {WORDS} words, width {WIDTH}")
    table("", "peak, MiB", "time / whole logits")
    for name in made:
        pairs = zip(times[name], times["whole logits"], strict=True)
        ratio = statistics.median(one / other for one, other in pairs)
        print(f"| {name} | {peaks[name]:.0f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
