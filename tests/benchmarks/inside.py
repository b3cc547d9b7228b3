"""What the inner cut costs in time and memory.

    python -m tests.benchmarks.inside [--rounds 7] [--only peak time tokens peer]

A convolutional net with GroupNorm and a two-layer transformer make one vector of each
row, and a loss looks at the vectors of all rows. One step is the gradient of a window:

- inner cut: `Chunked`, which runs the net in chunks of rows;
- by hand: the two passes of the GradCache paper (arXiv 2101.06983), written for this
  net: vectors without a graph, the gradient of the loss at the vectors, then each chunk
  once more with a graph;
- plain: accumulation over chunks, each with its own loss: the gradient is another one;
- whole: all rows at once.

Times are the processor's, on one thread, the best of all rounds; each round runs all
kinds of step in an order of its own. Peaks are the most bytes of operators' outputs
that live at once in one of the first four steps. Then the loss of sentence-transformers
that caches gradients, if that package is there.
"""

from __future__ import annotations

import argparse
import copy
import random
import time
import warnings
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from tests.benchmarks import inside_contrastive
from tests.benchmarks.live_bytes import LiveBytes
from tests.helpers import gradients
from trainkit.core.inside.forward import Chunked

WINDOW, CHUNKS, WIDTH = 256, (4, 16, 64), 64
STEPS = 4
"""The steps whose peak counts: the first ones check, and keep, different things."""

Step = Callable[[], None]


class Transformer(nn.Module):
    """Two layers over 32 tokens, and the mean of what they give."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 128)
        layer = nn.TransformerEncoderLayer(
            128, 4, 512, 0.0, activation="gelu", batch_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(128, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(ids)).mean(1))


def convolutions() -> nn.Module:
    def block(ins: int, outs: int, stride: int) -> list[nn.Module]:
        return [nn.Conv2d(ins, outs, 3, stride, 1), nn.GroupNorm(8, outs), nn.ReLU()]

    blocks = [*block(3, 32, 1), *block(32, 64, 2), *block(64, 128, 2)]
    ends = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, WIDTH)]
    return nn.Sequential(*blocks, *ends)


def wide() -> nn.Module:
    """Layers whose parameters outweigh what a chunk's graph holds."""
    layers = [nn.Linear(512, 512) for _ in range(8)]
    return nn.Sequential(*layers, nn.Linear(512, WIDTH))


Rows = Callable[[int], Tensor]

NETS: dict[str, tuple[Callable[[], nn.Module], Rows]] = {
    "convolutions": (convolutions, lambda rows: torch.randn(rows, 3, 32, 32)),
    "transformer": (Transformer, lambda rows: torch.randint(0, 1000, (rows, 32))),
}

HEAVY = {"wide layers": (wide, lambda rows: torch.randn(rows, 512))}
"""Whose peak alone is of interest."""


def loss_of(vectors: Tensor) -> Tensor:
    """Entries of a vector must spread over the batch, and not follow each other."""
    z = (vectors - vectors.mean(0)) / (vectors.std(0) + 1e-3)
    return (z.T @ z / len(z) - torch.eye(WIDTH).to(z)).square().sum()


# ---- steps ---------------------------------------------------------------------------


def whole(net: nn.Module, rows: Tensor, chunk: int) -> Step:
    return lambda: loss_of(net(rows)).backward()


def plain(net: nn.Module, rows: Tensor, chunk: int) -> Step:
    def step() -> None:
        for part in rows.split(chunk):
            (loss_of(net(part)) * (len(part) / len(rows))).backward()

    return step


def by_hand(net: nn.Module, rows: Tensor, chunk: int) -> Step:
    def step() -> None:
        parts, states, found = rows.split(chunk), [], []
        with torch.no_grad():
            for part in parts:
                states.append(torch.get_rng_state())
                found.append(net(part))
        vectors = torch.cat(found).requires_grad_()
        loss_of(vectors).backward()
        assert vectors.grad is not None
        now = torch.get_rng_state()
        pieces = vectors.grad.split(chunk)
        for part, state, gradient in zip(parts, states, pieces, strict=True):
            torch.set_rng_state(state)
            net(part).backward(gradient)
        torch.set_rng_state(now)

    return step


def inner(net: nn.Module, rows: Tensor, chunk: int) -> Step:
    Chunked(net, size=chunk)
    return whole(net, rows, chunk)


KINDS: dict[str, Callable[..., Step]] = {
    "whole": whole,
    "plain": plain,
    "by hand": by_hand,
    "inner cut": inner,
}


class Contestant:
    """A net of its own, and a kind of step.

    Attributes:
        net: a copy of the net that it was made of.
        seconds: of its best step.
    """

    def __init__(self, kind: Callable[..., Step], net: nn.Module, *how: Any) -> None:
        self.net = copy.deepcopy(net)
        self.seconds = float("inf")
        self._step = kind(self.net, *how)

    def step(self) -> None:
        self.net.zero_grad()
        began = time.process_time()
        self._step()
        self.seconds = min(self.seconds, time.process_time() - began)

    def gradient(self) -> Tensor:
        """Of the second step, which keeps graphs."""
        self.step()
        self.step()
        return gradients(self.net)

    def peak(self) -> float:
        """In MiB."""
        peaks = []
        for _ in range(STEPS):
            self.net.zero_grad()
            with LiveBytes() as live:
                self._step()
            peaks.append(live.peak)
        return max(peaks) / 2**20


def race(contestants: list[Contestant], rounds: int) -> None:
    """Let them run in turn; two rounds warm up."""
    for number in range(rounds + 2):
        for each in random.sample(contestants, len(contestants)):
            if number == 2:
                each.seconds = float("inf")
            each.step()


def distance(one: Contestant, other: Contestant) -> float:
    """How far off one gradient is from the other."""
    first, second = one.gradient(), other.gradient()
    return float((first - second).norm() / second.norm())


def deviation(kind: str, reference: str, name: str, rows: int, chunk: int) -> float:
    """How far off one kind of step is from another, in float64."""
    make, draw = NETS[name]
    net, given = make().double(), draw(rows)
    given = given.double() if given.is_floating_point() else given
    one, two = (
        Contestant(KINDS[each], net, given, chunk) for each in (kind, reference)
    )
    return distance(one, two)


# ---- tables --------------------------------------------------------------------------


def measure_peaks(name: str, chunk: int = 8) -> None:
    make, draw = (NETS | HEAVY)[name]
    net = make()
    for window in (64, 256, 1024):
        rows = draw(window)
        found = {k: Contestant(KINDS[k], net, rows, chunk).peak() for k in KINDS}
        # The vectors of all rows, and their gradient.
        ends = 2 * window * WIDTH * 4 / 2**20
        cut, plain = found["inner cut"], found["plain"]
        figures = " | ".join(f"{each:.1f}" for each in found.values())
        ratios = f"{cut / plain:.2f} | {(cut - ends) / plain:.2f}"
        print(f"| {name}, {window} rows | {figures} | {ratios} |", flush=True)


def measure_times(name: str, rounds: int) -> None:
    make, draw = NETS[name]
    net, rows = make(), draw(WINDOW)
    ratios = []
    for chunk in CHUNKS:
        found = {k: Contestant(kind, net, rows, chunk) for k, kind in KINDS.items()}
        race(list(found.values()), rounds)
        off = deviation("inner cut", "by hand", name, WINDOW, chunk)
        times = {k: each.seconds for k, each in found.items()}
        cut = times["inner cut"]
        ratios.append((cut / times["plain"], cut / times["by hand"]))
        figures = " | ".join(f"{1000 * each:.0f}" for each in times.values())
        one, two = ratios[-1]
        print(
            f"| {name}, chunks of {chunk} | {figures} | {one:.2f} | {two:.2f} "
            f"| {off:.0e} |",
            flush=True,
        )
    one, two = map(median, zip(*ratios, strict=True))
    print(f"| {name}, median | | | | | {one:.2f} | {two:.2f} | |", flush=True)


class Ragged(Transformer):
    """A transformer that sees no padding, and pools the columns that are none."""

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        assert attention_mask is not None
        out = self.layers(self.embed(ids), src_key_padding_mask=attention_mask == 0)
        return self.head(out)


def ragged(net: nn.Module, ids: Tensor, mask: Tensor, cut: dict[str, int]) -> Step:
    if cut:
        Chunked(net, **cut)  # type: ignore[arg-type]
    weights = mask[..., None] / mask.sum(1)[:, None, None]
    return lambda: loss_of((net(ids, attention_mask=mask) * weights).sum(1)).backward()


def measure_tokens(rounds: int, rows: int = 64, width: int = 256) -> None:
    """Lengths are log-normal, so that most columns of most rows are padding."""
    lengths = torch.empty(rows).log_normal_(4, 0.7).long().clamp(2, width)
    lengths[0] = width
    mask = (torch.arange(width) < lengths[:, None]).long()
    ids = torch.randint(0, 1000, (rows, width)) * mask
    cuts = {"whole": {}, "size=8": {"size": 8}, "tokens=2048": {"tokens": 2048}}
    net = Ragged()
    found = {k: Contestant(ragged, net, ids, mask, cut) for k, cut in cuts.items()}
    race(list(found.values()), rounds)
    whole = found["whole"]
    for name, each in found.items():
        print(
            f"| {name} | {1000 * each.seconds:.0f} | {each.seconds / whole.seconds:.2f}"
            f" | {each.peak():.1f} | {distance(each, whole):.0e} |",
            flush=True,
        )
    print(f"{int(lengths.sum())} of {rows * width} tokens are no padding.")


def measure_peer(rounds: int) -> None:
    if not inside_contrastive.is_there():
        print("\nsentence-transformers is not installed: its loss is left out.")
        return
    table("contrastive, 2 x 128 rows", "ms a step", "/ cached", "peak, MiB", "off by")
    net, given = inside_contrastive.bert(), inside_contrastive.columns()
    for chunk in CHUNKS:
        kinds = inside_contrastive.kinds(chunk)
        found = {name: Contestant(kind, net, given) for name, kind in kinds.items()}
        race(list(found.values()), rounds)
        best = found["cached"].seconds
        for name, each in found.items():
            time, ratio = 1000 * each.seconds, each.seconds / best
            off = distance(each, found["whole"])
            print(
                f"| {name}, chunks of {chunk} | {time:.0f} | {ratio:.2f} "
                f"| {each.peak():.1f} | {off:.0e} |",
                flush=True,
            )


def table(head: str, *columns: str) -> None:
    print(f"\n| {head} | {' | '.join(columns)} |")
    print(f"|---|{'---:|' * len(columns)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="What the inner cut costs.")
    parser.add_argument("--rounds", type=int, default=7)
    parts = ("peak", "time", "tokens", "peer")
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    if "peak" in options.only:
        table("peak, MiB, chunks of 8", *KINDS, "/ plain", "without vectors")
        for name in NETS | HEAVY:
            measure_peaks(name)
    if "time" in options.only:
        head = f"ms a step, {WINDOW} rows"
        table(head, *KINDS, "/ plain", "/ by hand", "off by")
        for name in NETS:
            measure_times(name, options.rounds)
    if "tokens" in options.only:
        table("ragged rows", "ms a step", "/ whole", "peak, MiB", "off by")
        measure_tokens(options.rounds)
    if "peer" in options.only:
        measure_peer(options.rounds)


if __name__ == "__main__":
    main()
