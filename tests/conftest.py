"""One thread: the models are tiny, and several processes share the machine."""

import gc
import os
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")  # also for processes that tests start

import pytest
from hypothesis import settings

from tests.startup import forget_forking, forking, share


def pytest_configure(config: pytest.Config) -> None:
    settings.register_profile("busy", deadline=None)  # no test asserts a time
    settings.load_profile("busy")
    if hasattr(config, "workerinput"):
        forget_forking()
    else:
        share(at_once=_has_workers(config))
    if not _has_workers(config):  # it runs tests itself
        import torch

        torch.set_num_threads(1)


@pytest.hookimpl(wrapper=True)
def pytest_sessionstart(session: pytest.Session) -> Iterator[None]:
    """Workers are forks of the server."""
    if not _has_workers(session.config):
        return (yield)
    with forking():
        return (yield)


def _has_workers(config: pytest.Config) -> bool:
    is_worker = hasattr(config, "workerinput")
    return not is_worker and config.getoption("dist", "no") != "no"


def pytest_collection_finish() -> None:
    gc.set_threshold(50_000, 20, 100)  # Trainers make many objects: a tenth of the time
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
    """One more than there are cores: tests of ranks and processes wait for them."""
    return (os.cpu_count() or 1) + 1
