"""Finding the submodules that may run in chunks of rows, on rows of a batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from warnings import catch_warnings, simplefilter

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from trainkit.core.batch_norm.layers import listed, normalising_by_batch
from trainkit.core.generators import random_kept
from trainkit.core.inside.forward import ChunkedForward
from trainkit.core.inside.moment import attributes_of
from trainkit.core.inside.refusals import paths_within
from trainkit.core.inside.rows import Sizes
from trainkit.core.nested import describe
from trainkit.core.ranks import Ranks
from trainkit.core.split.micro_batching import SELF
from trainkit.core.tape.forward import TapedForward
from trainkit.errors import TrainkitError
from trainkit.lit.batch_norm.guard import BatchNormGuard
from trainkit.lit.callback.base import find_callback
from trainkit.lit.inside.refusals import refused_logs
from trainkit.lit.proof.rehearse import Rehearsal
from trainkit.lit.proof.rows import FewRows
from trainkit.lit.proof.verdict import NotMeasured, in_one_line

ROWS = 5
LEAST_SHARE = 0.05
"""A module that holds less of the graph's memory is not worth a second pass."""


@dataclass
class _Called:
    """The first call of a submodule, and the bytes that its graph has kept."""

    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    bytes: int = 0


def choose(trainer: Any, pl_module: Any, windows: Any, batch: Any) -> list[str]:
    """The outermost submodules whose rows do not see each other, by their paths.

    They are found on a copy.

    Args:
        trainer: in `fit`.
        pl_module: what trains.
        windows: the callback that divides windows.
        batch: the first one, as the loader has yielded it.

    Raises:
        TrainkitError: there is none.
    """
    if not pl_module.automatic_optimization:
        raise _unfit(
            pl_module,
            "it runs training_step on a few rows, which a module with "
            "automatic_optimization=False would take a step with",
        )
    try:
        rows = FewRows(batch, None, None)
        few = list(range(min(ROWS, rows.num_rows)))
        own = rows.make(few, alike=True)
    except (TrainkitError, NotMeasured) as error:
        raise _unfit(
            pl_module,
            f"it runs training_step on a few rows of the batch, and they cannot be "
            f"cut from {describe(batch)}",
        ) from error
    guard, watch = find_callback(trainer, BatchNormGuard), _Watch()
    guards = [] if guard is None else [guard]
    of = trainer, pl_module, windows
    rehearsal = Rehearsal(*of, callbacks=guards, changes=(watch.begin,))
    try:
        with watch:
            rehearsal.run([own], [few])
    except Exception as error:
        why = "" if isinstance(error, NotMeasured) else "that failed: "
        raise _unfit(
            pl_module,
            f"it runs training_step on {len(few)} rows of the batch, and "
            f"{why}{in_one_line(error)}",
        ) from error
    copied = watch.module.to(pl_module.device)
    with catch_warnings(), random_kept(pl_module.device):
        simplefilter("ignore")  # what others say of a few rows is not for the user
        is_exact = guard is not None and guard.is_exact
        chooser = _Chooser(copied, watch, is_exact)
        found = list(chooser.fitting(copied))
    if found:
        return found
    reasons = list(chooser.reasons.items())[:3]
    said = "; ".join(f"{path}: {reason}" for path, reason in reasons)
    raise TrainkitError(
        f'MicroBatching inside="auto": no submodule of {type(pl_module).__name__} can '
        f"run in chunks of rows. {said or 'None was called with rows.'}. Name one with "
        f"inside='path'."
    )


def _unfit(pl_module: nn.Module, text: str) -> TrainkitError:
    found = paths_within(pl_module, SELF) or ["path"]
    inside = repr(found[0] if len(found) == 1 else found)
    return TrainkitError(
        f'MicroBatching inside="auto": {text}. Name the submodules: inside={inside}.'
    )


class _Watch:
    """Notes the first call of each submodule of a copy, and what its graph keeps."""

    def __init__(self) -> None:
        self.module: Any = None
        self.calls: dict[nn.Module, _Called] = {}
        self._running: list[_Called] = []
        self._total = _Called(((), {}))
        self._handles: list[Any] = []
        self._saved = saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def __enter__(self) -> _Watch:
        self._saved.__enter__()
        return self

    def __exit__(self, *_: Any) -> None:
        self._saved.__exit__(*_)
        for handle in self._handles:
            handle.remove()

    def begin(self, copied: nn.Module) -> None:
        """Watch the submodules of a copy."""
        self.module = copied
        for module in copied.modules():
            before = module.register_forward_pre_hook(self._begin, with_kwargs=True)
            after = module.register_forward_hook(self._end, always_call=True)
            self._handles += [before, after]

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        called = self.calls.setdefault(module, _Called((args, kwargs)))
        self._running.append(called)

    def _end(self, *_: Any) -> None:
        self._running.pop()

    def _pack(self, tensor: Tensor) -> Tensor:
        size = tensor.untyped_storage().nbytes()
        self._total.bytes += size
        for called in self._running:
            called.bytes += size
        return tensor.detach()  # itself, an output would hold its own graph

    @property
    def total(self) -> int:
        """The bytes of all that the graph has kept."""
        return max(self._total.bytes, 1)


@dataclass
class _Chooser:
    """Tries submodules on their first calls. It takes none that leaves tensors in
    attributes, which would be those of a chunk.

    Attributes:
        pl_module: what trains.
        watch: has seen these calls.
        is_exact: whether rows may see each other in BatchNorm.
        reasons: why a submodule does not fit, by its path.
    """

    pl_module: Any
    watch: _Watch
    is_exact: bool
    reasons: dict[str, str] = field(default_factory=dict)

    def fitting(self, module: nn.Module, path: str = "") -> Iterator[str]:
        """The paths of the outermost submodules that fit, from `module` on."""
        called, name = self.watch.calls.pop(module, None), path or SELF
        if called is not None:
            if called.bytes < LEAST_SHARE * self.watch.total:
                return
            reason = self._reason(module, name, called)
            if not reason:
                yield name
                return
            self.reasons[name] = reason
        for name, child in module.named_children():
            yield from self.fitting(child, f"{path}.{name}".lstrip("."))

    def _reason(self, module: nn.Module, name: str, called: _Called) -> str:
        """Why a module is not taken; empty if it is."""
        cut: Any = ChunkedForward(module, name, Sizes(1))
        probe = cut.probe
        if self.is_exact and normalising_by_batch(module):
            cut = probe = TapedForward(module, Sizes(1), Ranks(), name)
        cut.refused = refused_logs(self.pl_module, module, name)
        try:
            probe(*called.arguments[0], **called.arguments[1])
            cached = _tensors_in(module)
            probe(*called.arguments[0], **called.arguments[1])
        except Exception as error:
            return in_one_line(error).removeprefix(f"{name}: ").split(". ")[0]
        now = _tensors_in(module)
        left = [path for path, tensor in now.items() if cached.get(path) is not tensor]
        return f"its forward leaves values in {listed(left)}" if left else ""


def _tensors_in(module: nn.Module) -> dict[str, Tensor]:
    held = attributes_of(module).items()
    return {name: value for name, value in held if isinstance(value, Tensor)}
