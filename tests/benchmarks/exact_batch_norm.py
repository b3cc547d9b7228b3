"""What exact BatchNorm costs in time and memory.

    python -m tests.benchmarks.exact_batch_norm [--rounds 7] [--only time peak gpu]

A small ResNet with 15 BatchNorm layers looks at images of 32 x 32. One step is the
gradient of a window:

- whole: all rows at once;
- plain: accumulation over chunks, each normalised by itself: another gradient;
- exact: `exact_batch_norm`, as `BatchNormGuard("exact")` uses it.

Times are the processor's, on one thread, the best of all rounds; each round runs all
kinds of step in an order of its own. Peaks are the most bytes of operators' outputs
that live at once. For them NumPy plays the host: what waits there is copied, and not
counted. On a GPU a ResNet-50 runs a window of 256 in chunks of 16.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.benchmarks.measuring import (
    Contestant,
    LiveBytes,
    Step,
    asked,
    distance,
    race,
    table,
)
from tests.core.tape.test_nets import numpy_as_host
from tests.zoo.conv_nets import resnet
from trainkit import exact_batch_norm


class Block(nn.Module):
    def __init__(self, ins: int, outs: int, stride: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(ins, outs, 3, stride, 1, bias=False)
        self.two = nn.Conv2d(outs, outs, 3, 1, 1, bias=False)
        self.norm, self.last = nn.BatchNorm2d(outs), nn.BatchNorm2d(outs)
        self.short: nn.Module = nn.Identity()
        if stride > 1:
            conv = nn.Conv2d(ins, outs, 1, stride, bias=False)
            self.short = nn.Sequential(conv, nn.BatchNorm2d(outs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.one(x)).relu()
        return (self.short(x) + self.last(self.two(y))).relu()


def small_resnet() -> nn.Module:
    blocks: list[nn.Module] = []
    for ins, outs, stride in [(16, 16, 1), (16, 32, 2), (32, 64, 2)]:
        blocks += [Block(ins, outs, stride), Block(outs, outs, 1)]
    stem = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    end = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
    return nn.Sequential(*stem, *blocks, *end)


# ---- steps ---------------------------------------------------------------------------

Data = tuple[Tensor, Tensor]


def chunks(data: Data, chunk: int) -> list[Data]:
    return list(zip(*(each.split(chunk) for each in data), strict=True))


def whole(net: nn.Module, data: Data, chunk: int) -> Step:
    images, labels = data
    return lambda: F.cross_entropy(net(images), labels).backward()


def plain(net: nn.Module, data: Data, chunk: int) -> Step:
    def step() -> None:
        for images, labels in chunks(data, chunk):
            loss = F.cross_entropy(net(images), labels)
            (loss * len(labels) / len(data[1])).backward()

    return step


def exact(net: nn.Module, data: Data, chunk: int) -> Step:
    images, labels = data
    own = exact_batch_norm(net, size=chunk)
    return lambda: F.cross_entropy(own(images), labels).backward()


KINDS: dict[str, Callable[..., Step]] = {"whole": whole, "plain": plain, "exact": exact}


def draw(window: int, size: int = 32, classes: int = 10) -> Data:
    return torch.randn(window, 3, size, size), torch.randint(0, classes, (window,))


def peak_of(step: Step) -> float:
    """In MiB, of the third of three steps, in which nothing is checked."""
    with numpy_as_host():
        step()
        step()
        with LiveBytes() as live:
            step()
    return live.peak / 2**20


# ---- tables --------------------------------------------------------------------------


def measure_times(rounds: int, window: int = 64) -> None:
    net, data = small_resnet(), draw(window)
    for chunk in (4, 8, 16):
        found = {k: Contestant(kind, net, data, chunk) for k, kind in KINDS.items()}
        race(list(found.values()), rounds)
        times = {k: each.seconds for k, each in found.items()}
        figures = " | ".join(f"{1000 * each:.0f}" for each in times.values())
        own = [times["exact"] / times[to] for to in ("plain", "whole")]
        ratios = " | ".join(f"{each:.2f}" for each in own)
        off = " | ".join(f"{deviation(kind, chunk):.0e}" for kind in list(KINDS)[1:])
        print(f"| chunks of {chunk} | {figures} | {ratios} | {off} |", flush=True)


def deviation(kind: str, chunk: int, window: int = 30) -> float:
    """How far off one kind of step is from the whole batch, in float64."""
    torch.manual_seed(0)
    net, (images, labels) = small_resnet().double(), draw(window)
    data = images.double(), labels
    one, two = (Contestant(KINDS[k], net, data, chunk) for k in (kind, "whole"))
    return distance(one, two)


def measure_peaks(chunk: int = 8) -> None:
    net = small_resnet()
    for window in (64, 256, 1024):
        data = draw(window)
        nets = [copy.deepcopy(net) for _ in KINDS]  # exact_batch_norm stays on its own
        kinds = zip(nets, KINDS.values(), strict=True)
        peaks = [peak_of(kind(each, data, chunk)) for each, kind in kinds]
        print(f"| {window} | {' | '.join(f'{each:.1f}' for each in peaks)} |")


def measure_gpu(rounds: int, window: int = 256, chunk: int = 16) -> None:
    if not torch.cuda.is_available():
        print("\nNo CUDA device: the ResNet-50 is left out.")
        return
    table(f"ResNet-50, {window} x 224 x 224", "ms a step", "/ whole", "/ plain", "GiB")
    images, labels = draw(window, 224, 1000)
    data = images.cuda(), labels.cuda()
    found: dict[str, tuple[float, float]] = {}
    for name, kind in KINDS.items():
        try:
            found[name] = on_gpu(kind(resnet().cuda(), data, chunk), rounds)
        except torch.cuda.OutOfMemoryError:
            found[name] = float("nan"), float("nan")
        torch.cuda.empty_cache()
    for name, (seconds, peak) in found.items():
        ratios = [seconds / found[to][0] for to in ("whole", "plain")]
        figures = " | ".join(f"{each:.2f}" for each in (*ratios, peak))
        print(f"| {name} | {1000 * seconds:.0f} | {figures} |", flush=True)


def on_gpu(step: Step, rounds: int) -> tuple[float, float]:
    """Seconds of the best step, and GiB beyond what is there between steps."""
    best = float("inf")
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for _ in range(rounds):
        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return best, (torch.cuda.max_memory_allocated() - before) / 2**30


def main() -> None:
    options = asked(__doc__, rounds=7, only=("time", "peak", "gpu"))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    if "time" in options.only:
        ratios = [f"exact / {to}" for to in ("plain", "whole")]
        off = [f"{kind}, off by" for kind in list(KINDS)[1:]]
        table("ms a step, 64 rows", *KINDS, *ratios, *off)
        measure_times(options.rounds)
    if "peak" in options.only:
        table("peak, MiB, window", *KINDS)
        measure_peaks()
    if "gpu" in options.only:
        measure_gpu(options.rounds)


if __name__ == "__main__":
    main()
