"""Finding the submodules that may run in chunks of rows, on rows of a batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from warnings import catch_warnings, simplefilter

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from trainkit.core.batches import describe
from trainkit.core.inside.chunks import Sizes
from trainkit.core.inside.cut import Coupling
from trainkit.core.inside.forward import ChunkedForward
from trainkit.core.inside.hints import paths_within
from trainkit.core.inside.keep import Keeper
from trainkit.core.strategies import Uniform
from trainkit.errors import TrainkitError
from trainkit.lit.inside.refusals import refusing_logs
from trainkit.lit.measure.clean import (
    NotMeasured,
    aside,
    in_one_line,
    lost_text,
    refuse_iterators,
)
from trainkit.lit.measure.first_rows import FirstRows
from trainkit.lit.measure.passes import Passes

ROWS = 5
SELF = "self"
"""The path of the module's own `forward`."""

LEAST_SHARE = 0.05
"""A module that holds less of the graph's memory is not worth a second pass."""


@dataclass
class _Called:
    """The first call of a submodule, and the bytes that its graph has kept."""

    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    bytes: int = 0


def choose(
    trainer: Any,
    pl_module: Any,
    batch: Any,
    arguments: tuple[Any, Any] | None,
    coupling: Coupling | None = None,
) -> list[str]:
    """The outermost submodules whose rows do not see each other, by their paths.

    Args:
        trainer: in `fit`.
        pl_module: what trains.
        batch: the first one.
        arguments: of `training_step` behind the batch; default: Lightning's.
        coupling: lets rows see each other in BatchNorm, if somebody asks for it.

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
        rows = FirstRows(batch, None, Uniform())
        number = min(ROWS, rows.num_rows)
        few = rows.take(list(range(number)))
    except TrainkitError as error:
        raise _unfit(
            pl_module,
            f"it runs training_step on a few rows of the batch, and they cannot be "
            f"cut from {describe(batch)}",
        ) from error
    passes = Passes(pl_module, number, dtype=None, as_it_is=True, arguments=arguments)
    with catch_warnings(), aside(trainer, pl_module):
        simplefilter("ignore")  # what others say of a few rows is not for the user
        with passes.prepared():
            watch = _Watch(pl_module)
            try:
                refuse_iterators(passes)
                with watch:
                    passes.run(few, range(number))
            except Exception as error:
                why = "" if isinstance(error, NotMeasured) else "that failed: "
                raise _unfit(
                    pl_module,
                    f"it runs training_step on {number} rows of the batch, and "
                    f"{why}{in_one_line(error)}",
                ) from error
            chooser = _Chooser(pl_module, watch, coupling)
            found = list(chooser.fitting(pl_module))
            passes.restore()
            if passes.lost:
                text = f"it ran training_step, and {lost_text(passes)}"
                raise _unfit(pl_module, text)
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


class _Watch(ExitStack):
    """Notes the first call of each submodule, and what its graph keeps."""

    def __init__(self, pl_module: nn.Module) -> None:
        super().__init__()
        self._module = pl_module
        self.calls: dict[nn.Module, _Called] = {}
        self._running: list[_Called] = []
        self._total = _Called(((), {}))

    def __enter__(self) -> _Watch:
        super().__enter__()
        for module in self._module.modules():
            if module is self._module and type(module).forward is nn.Module.forward:
                continue
            before = module.register_forward_pre_hook(self._begin, with_kwargs=True)
            after = module.register_forward_hook(self._end, always_call=True)
            self.callback(before.remove)
            self.callback(after.remove)
        self.enter_context(saved_tensors_hooks(self._pack, lambda tensor: tensor))
        return self

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
    """Tries submodules on their first calls.

    Attributes:
        pl_module: what trains.
        watch: has seen these calls.
        coupling: lets rows see each other in BatchNorm.
        reasons: why a submodule does not fit, by its path.
    """

    pl_module: Any
    watch: _Watch
    coupling: Coupling | None
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
        """Why a module is not taken: it is refused, or would be warned of."""
        cut = ChunkedForward(module, name, Sizes(1), Keeper(0))
        cut.around = refusing_logs(self.pl_module, module, name)
        cut.coupling = self.coupling
        try:
            said = cut.probe(*called.arguments[0], **called.arguments[1])
        except Exception as error:
            said = [in_one_line(error).removeprefix(f"{name}: ")]
        return said[0].split(". ")[0] if said else ""
