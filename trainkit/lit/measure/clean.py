"""Where passes of a few rows leave no trace, and what surrounds them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from textwrap import shorten
from typing import Any

import torch
from lightning.pytorch.loggers.logger import DummyLogger
from torch import nn
from torch.nn.parameter import is_lazy

from trainkit.errors import TrainkitError
from trainkit.lit._compat import parts_of
from trainkit.lit.rerun.snapshot import Snapshot


class NotMeasured(Exception):  # nothing is wrong
    """The proof would not be cheap or clean here; its text says why."""


def in_one_line(error: BaseException) -> str:
    """The first sentence of an error, in whole words."""
    first = str(error).strip().split("\n")[0].split(". ")[0].rstrip(".")
    said = shorten(first, 200, placeholder=" ...")
    if isinstance(error, NotMeasured | TrainkitError):
        return said
    return f"{type(error).__name__}: {said}"


def refuse_unclean(trainer: Any, module: Any) -> None:
    """Refuse where passes of a few rows would not be cheap or leave no trace."""
    if communicates(trainer, module):
        raise NotMeasured("a pass communicates with other ranks")
    parameters = list(module.parameters())
    if any(is_lazy(each) for each in parameters):
        raise NotMeasured("parameters get their shape in the first pass")
    trained = [each for each in parameters if each.requires_grad]
    if any(each.dtype.itemsize < 4 for each in trained):
        raise NotMeasured("the parameters are in half precision; see trainkit.check")


def refuse_counted_passes(trainer: Any) -> None:
    """Refuse a DDP that counts the gradients which arrive at parameters, as they do in
    a pass of several steps that share BatchNorm's statistics."""
    if getattr(trainer.strategy.model, "static_graph", False):
        raise NotMeasured("DDP with static_graph=True would count its backward passes")


def refuse_iterators(passes: Any) -> None:
    """Refuse where passes would move what cannot be put back."""
    for place in passes.iterators:
        raise NotMeasured(
            f"{place} is an iterator, or holds one, which cannot be put back"
        )


def lost_text(passes: Any) -> str:
    """What passes have moved and could not put back."""
    caches = " and ".join(passes.lost)
    return f"a full or cleared functools.lru_cache is not put back: {caches}"


def communicates(trainer: Any, module: Any) -> bool:
    """Whether a pass waits for other ranks, or its parameters are spread over them."""
    kinds = {cls.__name__ for cls in type(trainer.strategy).__mro__}
    if not kinds & {"SingleDeviceStrategy", "DDPStrategy"}:
        return True
    return trainer.world_size > 1 and any(
        isinstance(each, nn.SyncBatchNorm) for each in module.modules()
    )


@contextlib.contextmanager
def aside(trainer: Any, module: Any) -> Iterator[None]:
    """Nothing is logged, computed in half precision, or left behind."""
    kept = Snapshot(others=parts_of(trainer))
    kind = module.device.type
    precision = torch.get_float32_matmul_precision()
    try:
        trainer.loggers = [_Silent(each) for each in trainer.loggers]
        torch.set_float32_matmul_precision("highest")
        with torch.autocast(kind, enabled=False), _exact_convolutions():
            yield
    finally:
        torch.set_float32_matmul_precision(precision)
        kept.restore()


class _Silent(DummyLogger):
    """Logs nothing, and has the folders and names of the logger that it stands for."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self._own = own

    def __getattribute__(self, name: str) -> Any:
        if name in ("name", "version", "save_dir", "log_dir", "root_dir"):
            return getattr(self._own, name)
        return super().__getattribute__(name)


@contextlib.contextmanager
def _exact_convolutions() -> Iterator[None]:
    if not torch.cuda.is_available():
        yield
        return
    with torch.backends.cudnn.flags(allow_tf32=False):
        yield


def largest(trainer: Any, number: float) -> float:
    """The largest of a number on all ranks."""
    if trainer.world_size == 1:
        return number
    device = trainer.strategy.root_device
    given = torch.tensor([number], dtype=torch.float32, device=device)
    return float(trainer.strategy.all_gather(given).max())
