"""One thread: the models are tiny, and several processes share the machine."""

import functools
import gc
import importlib.metadata
import os

# Every Trainer looks for callbacks in what is installed: 6 ms, for thousands of them.
importlib.metadata.entry_points = functools.cache(importlib.metadata.entry_points)

os.environ.setdefault("OMP_NUM_THREADS", "1")  # also for processes that tests start

import pytest  # noqa: E402

from tests.startup import share  # noqa: E402


def pytest_configure(config: pytest.Config) -> None:
    is_worker = hasattr(config, "workerinput")
    if not is_worker:
        share()
    if is_worker or config.getoption("dist", "no") == "no":  # it runs tests itself
        import torch

        torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    _keep()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> object:
    done = yield
    if nextitem is None or nextitem.path != item.path:
        _keep()
    return done


def _keep() -> None:
    """What imports and reports have made is there to stay: a full collection, which a
    window that ran out of memory asks for, then looks at a file's own objects only."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: tests that wait for a process leave one idle."""
    return (os.cpu_count() or 1) + 1
