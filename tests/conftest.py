"""One thread: the models are tiny, and several processes share the machine."""

import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # also for processes that tests start

import pytest
import torch

from tests.startup import share

torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        share()


def pytest_collection_finish() -> None:
    """What the imports have made is there to stay: a full collection, which a window
    that ran out of memory asks for, then looks at the tests' own objects only."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: tests that wait for a process leave one idle."""
    return (os.cpu_count() or 1) + 1
