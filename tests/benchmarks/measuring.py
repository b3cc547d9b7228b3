"""What several benchmarks share: options, a net, memory, races and tables."""

from __future__ import annotations

import argparse
import copy
import random
import time
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.helpers import gradients

Step = Callable[[], None]


def asked(what: str | None, **options: Any) -> argparse.Namespace:
    """What the command line says, which `what` explains.

    Args:
        what: of the whole program.
        options: numbers, and choices of which one or several may be named.
    """
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=what, formatter_class=style)
    for name, value in options.items():
        how: Any = {"type": type(value)}
        if isinstance(value, tuple):
            how = {"nargs": "+", "choices": value}
        parser.add_argument(f"--{name}", default=value, **how)
    return parser.parse_args()


def table(head: str, *columns: str) -> None:
    """The head of a table in Markdown."""
    print(f"\n| {head} | {' | '.join(columns)} |")
    print(f"|---|{'---:|' * len(columns)}", flush=True)


class Transformer(nn.Module):
    """A small encoder.

    Args:
        words: that it knows.
        outputs: for each token, or for the mean of a row's.
        width: of a token.
        layers: how many.
        pools: whether it takes the mean of each row.
        options: of its layers.
    """

    def __init__(
        self,
        words: int,
        outputs: int,
        *,
        width: int = 128,
        layers: int = 2,
        pools: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        self.pools = pools
        self.embed = nn.Embedding(words, width)
        options = {"nhead": 4, "dim_feedforward": 4 * width, **options}
        layer = nn.TransformerEncoderLayer(width, batch_first=True, **options)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, outputs)

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        padding = None if attention_mask is None else attention_mask == 0
        hidden = self.layers(self.embed(ids), src_key_padding_mask=padding)
        return self.head(hidden.mean(1) if self.pools else hidden)


def convolutions(strides: tuple[int, ...], outputs: int, width: int = 32) -> nn.Module:
    """A small net of images, whose rows do not see each other."""
    widths = [3, *(width * 2**number for number in range(len(strides)))]
    layers: list[nn.Module] = []
    for ins, outs, stride in zip(widths, widths[1:], strides, strict=False):
        conv = nn.Conv2d(ins, outs, 3, stride, 1)
        layers += [conv, nn.GroupNorm(8, outs), nn.ReLU()]
    ends = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], outputs)]
    return nn.Sequential(*layers, *ends)


SMOOTH: dict[str, Any] = {"dropout": 0.0, "activation": "gelu"}
"""Of a transformer whose gradient is compared: a ReLU that rounding carries over its
kink moves it by 1e-4."""

# ---- memory --------------------------------------------------------------------------


class LiveBytes(TorchDispatchMode):
    """Counts what operators make, as long as it lives: a graph, outputs, gradients.

    What an operator needs inside is not seen, nor is what was there before.

    Attributes:
        peak: the most bytes at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._now = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        given = {_storage(each)._cdata for each in _tensors((args, kwargs))}
        for each in _tensors(output):
            storage = _storage(each)
            if storage._cdata not in given and storage._cdata not in self._known:
                self._count(storage)
        return output

    def _count(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()

        def freed(_: Any) -> None:
            self._now -= size
            del self._known[key]

        self._known[key] = weakref.ref(storage, freed)
        self._now += size
        self.peak = max(self.peak, self._now)


def _tensors(values: Any) -> list[Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]


def _storage(tensor: Tensor) -> Any:
    return tensor.untyped_storage()


# ---- races ---------------------------------------------------------------------------


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
        for _ in range(4):  # the first ones check, and keep, different things
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
