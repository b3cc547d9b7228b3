"""Finding the submodules that may run in chunks of rows, on rows of a batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
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
from trainkit.lit.inside.refusals import refused_logs
from trainkit.lit.proof.rehearse import Rehearsal
from trainkit.lit.proof.report import in_one_line
from trainkit.lit.proof.rows import FewRows

ROWS = 5
LEAST_SHARE = 0.05
"""A module that holds less of the graph's memory is not worth a second pass."""


def choose(
    trainer: Any, pl_module: Any, windows: Any, batch: Any, callbacks: Sequence[Any]
) -> list[str]:
    """The outermost submodules whose rows do not see each other, by their paths.

    They are found on a copy.

    Args:
        trainer: in `fit`.
        pl_module: what trains.
        windows: the callback that divides windows.
        batch: the first one, as the loader has yielded it.
        callbacks: of the run, of which a `BatchNormGuard` counts.

    Raises:
        TrainkitError: there is none.
    """
    guards = [each for each in callbacks if isinstance(each, BatchNormGuard)]
    search = _Search()
    of = trainer, pl_module, windows
    try:
        rows = FewRows.cut_from(batch, None, None)
        few = list(range(min(ROWS, rows.num_rows)))
        rehearsal = Rehearsal(*of, callbacks=guards, changes=(search.begin,))
        own = rows.make(few)
        with saved_tensors_hooks(search.pack, lambda tensor: tensor):
            rehearsal.run([own], [few])
    except Exception as error:
        named = paths_within(pl_module, SELF) or ["path"]
        inside = repr(named[0] if len(named) == 1 else named)
        raise TrainkitError(
            f'MicroBatching inside="auto": it runs training_step on a few rows of '
            f"{describe(batch)}, and that failed: {in_one_line(error)}. Name the "
            f"submodules: inside={inside}."
        ) from error
    finally:
        search.end()
    copied = search.module.to(pl_module.device)
    with catch_warnings(), random_kept(pl_module.device):
        simplefilter("ignore")  # what others say of a few rows is not for the user
        search.is_exact = any(guard.is_exact for guard in guards)
        found = list(search.fitting(copied))
    if found:
        return found
    reasons = list(search.reasons.items())[:3]
    said = "; ".join(f"{path}: {reason}" for path, reason in reasons)
    raise TrainkitError(
        f'MicroBatching inside="auto": no submodule of {type(pl_module).__name__} can '
        f"run in chunks of rows. {said or 'None was called with rows.'}. Name one with "
        f"inside='path'."
    )


class _Search:
    """Notes the first call of each submodule of a copy, and what its graph keeps; then
    tries submodules on these calls. It takes none that leaves tensors in attributes,
    which would be those of a chunk.

    Attributes:
        module: the copy.
        is_exact: whether rows may see each other in BatchNorm.
        reasons: why a submodule does not fit, by its path.
    """

    def __init__(self) -> None:
        self.module: Any = None
        self.is_exact = False
        self.reasons: dict[str, str] = {}
        self._calls: dict[nn.Module, tuple[Any, dict[str, Any]]] = {}
        self._bytes = Counter[nn.Module | None]()  # of None: in all
        self._running: list[nn.Module | None] = [None]
        self._handles: list[Any] = []

    def begin(self, copied: nn.Module) -> None:
        """Watch the submodules of a copy."""
        self.module = copied
        for module in copied.modules():
            before = module.register_forward_pre_hook(self._called, with_kwargs=True)
            after = module.register_forward_hook(self._left, always_call=True)
            self._handles += [before, after]

    def end(self) -> None:
        """Watch them no longer."""
        for handle in self._handles:
            handle.remove()

    def _called(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._calls.setdefault(module, (args, kwargs))
        self._running.append(module)

    def _left(self, *_: Any) -> None:
        self._running.pop()

    def pack(self, tensor: Tensor) -> Tensor:
        """Count what a graph saves for those that run."""
        for each in self._running:
            self._bytes[each] += tensor.untyped_storage().nbytes()
        return tensor.detach()  # itself, an output would hold its own graph

    def fitting(self, module: nn.Module, path: str = "") -> Iterator[str]:
        """The paths of the outermost submodules that fit, from `module` on."""
        name = path or SELF
        if call := self._calls.pop(module, None):
            if self._bytes[module] < LEAST_SHARE * max(self._bytes[None], 1):
                return
            reason = self._reason(module, name, *call)
            if not reason:
                yield name
                return
            self.reasons[name] = reason
        for name, child in module.named_children():
            yield from self.fitting(child, f"{path}.{name}".lstrip("."))

    def _reason(
        self, module: nn.Module, name: str, args: Any, kwargs: dict[str, Any]
    ) -> str:
        """Why a module is not taken; empty if it is."""
        cut: Any = ChunkedForward(module, name, Sizes(1))
        probe = cut.probe
        if self.is_exact and normalising_by_batch(module):
            cut = probe = TapedForward(module, Sizes(1), Ranks(), name)
        cut.refused = refused_logs(self.module, module, name)
        try:
            probe(*args, **kwargs)
            cached = _tensors_in(module)
            probe(*args, **kwargs)
        except Exception as error:
            return in_one_line(error).removeprefix(f"{name}: ").split(". ")[0]
        now = _tensors_in(module)
        left = [path for path, tensor in now.items() if cached.get(path) is not tensor]
        return f"its forward leaves values in {listed(left)}" if left else ""


def _tensors_in(module: nn.Module) -> dict[str, Tensor]:
    held = attributes_of(module).items()
    return {name: value for name, value in held if isinstance(value, Tensor)}
