"""Gradient accumulation that is exactly the big batch, for PyTorch Lightning.

    gradient of a step = sum_i w_i * grad(mean loss of micro-batch i) / sum_i w_i

over all micro-batches of the window, on all ranks. Importing `trainkit` loads neither
torch nor lightning: each name below brings in what it needs when it is first used.
"""

# The names are in the stub beside this file.
# pyright: reportUnsupportedDunderAll=false

import os

import lazy_loader

__version__ = "0.1.0"

__all__ = [
    "AccumulationCallback",
    "AccumulationMixin",
    "AccumulationSchedule",
    "AccumulationStrategy",
    "Accumulator",
    "BatchNormGuard",
    "Chunked",
    "ExactResume",
    "LRScaling",
    "MicroBatching",
    "NoiseScale",
    "PerClassWeight",
    "PerSample",
    "PerToken",
    "ResumableLoader",
    "TrainkitError",
    "Uniform",
    "Weighed",
    "WindowMonitor",
    "check",
    "exact_batch_norm",
    "find_micro_batch",
]
"""The names that the README uses; the stub beside this file has all of them."""

__getattr__, _, _ = lazy_loader.attach_stub(__name__, __file__)


_HERE = os.path.dirname(os.path.abspath(__file__))
if not os.path.isdir(os.path.join(_HERE, "conf")):
    # In a clone, trainkit.conf and trainkit.recipes stand beside the package.
    __path__.append(os.path.dirname(_HERE))


def __dir__() -> list[str]:
    return __all__.copy()
