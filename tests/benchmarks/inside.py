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
that live at once in one of the first four steps.

Then two columns of 128 rows go through a tiny BERT, if sentence-transformers is there,
and each row of the first is to find its row of the second. Its loss that caches
gradients cuts both columns itself; the inner cut is under the plain loss, which knows
nothing of it: around the whole model, whose output holds a vector for each token, or
around a module that returns one vector for each row.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from tests.benchmarks.measuring import (
    SMOOTH,
    Contestant,
    Step,
    Transformer,
    asked,
    convolutions,
    distance,
    race,
    table,
)
from trainkit.core.inside.forward import Chunked

WINDOW, CHUNKS, WIDTH = 256, (4, 16, 64), 64


def transformer(*, pools: bool = True) -> nn.Module:
    """One vector of each row, or of each token."""
    return Transformer(1000, WIDTH, pools=pools, **SMOOTH)


def wide() -> nn.Module:
    """Layers whose parameters outweigh what a chunk's graph holds."""
    layers = [nn.Linear(512, 512) for _ in range(8)]
    return nn.Sequential(*layers, nn.Linear(512, WIDTH))


Rows = Callable[[int], Tensor]

NETS: dict[str, tuple[Callable[[], nn.Module], Rows]] = {
    "convolutions": (
        lambda: convolutions((1, 2, 2), WIDTH),
        lambda rows: torch.randn(rows, 3, 32, 32),
    ),
    "transformer": (transformer, lambda rows: torch.randint(0, 1000, (rows, 32))),
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


def deviation(kind: str, reference: str, name: str, rows: int, chunk: int) -> float:
    """How far off one kind of step is from another, in float64."""
    make, draw = NETS[name]
    net, given = make().double(), draw(rows)
    given = given.double() if given.is_floating_point() else given
    kinds = (KINDS[kind], KINDS[reference])
    return distance(*(Contestant(each, net, given, chunk) for each in kinds))


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
    net = transformer(pools=False)
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


# ---- a peer --------------------------------------------------------------------------


class Vectors(nn.Module):
    """A model that returns its rows' vectors, and nothing else."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"sentence_embedding": self.inner(features)["sentence_embedding"]}


def bert() -> nn.Module:
    """A model of sentence-transformers, with weights of its own."""
    from sentence_transformers import SentenceTransformer  # pyright: ignore[reportMissingImports]
    from sentence_transformers.models import Pooling  # pyright: ignore[reportMissingImports]
    from transformers import BertConfig, BertModel

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = BertConfig(
                vocab_size=1000,
                hidden_size=128,
                num_hidden_layers=2,
                num_attention_heads=4,
                intermediate_size=4 * 128,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
            )
            self.bert = BertModel(config, add_pooling_layer=False)

        def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
            found = self.bert(features["input_ids"], features["attention_mask"])
            return {**features, "token_embeddings": found.last_hidden_state}

    return SentenceTransformer(modules=[Words(), Pooling(128)], device="cpu").train()


def columns() -> list[dict[str, Tensor]]:
    ids = torch.randint(0, 1000, (2, 128, 48))
    return [{"input_ids": i, "attention_mask": torch.ones_like(i)} for i in ids]


def peer_kinds(chunk: int) -> dict[str, Callable[[nn.Module, Any], Step]]:
    """Kinds of step, each of which makes a step of a model and its columns."""
    from sentence_transformers import losses  # pyright: ignore

    labels = torch.empty(0)

    def plain(net: Any, given: Any) -> Step:
        loss = losses.MultipleNegativesRankingLoss(net)
        return lambda: loss(map(dict, given), labels).backward()

    def cached(net: Any, given: Any) -> Step:
        loss = losses.CachedMultipleNegativesRankingLoss(net, mini_batch_size=chunk)
        return lambda: loss(list(map(dict, given)), labels).backward()

    def cut(net: Any, given: Any) -> Step:
        Chunked(net, size=chunk)
        return plain(net, given)

    def cut_vectors(net: Any, given: Any) -> Step:
        return cut(Vectors(net), given)

    return {"whole": plain, "cached": cached, "cut": cut, "cut, vectors": cut_vectors}


def measure_peer(rounds: int) -> None:
    names = ("sentence_transformers", "transformers")
    if not all(map(importlib.util.find_spec, names)):
        print("\nsentence-transformers is not installed: its loss is left out.")
        return
    table("contrastive, 2 x 128 rows", "ms a step", "/ cached", "peak, MiB", "off by")
    net, given = bert(), columns()
    for chunk in CHUNKS:
        kinds = peer_kinds(chunk)
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


def main() -> None:
    options = asked(__doc__, rounds=7, only=("peak", "time", "tokens", "peer"))
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
