"""Finding the submodules that may run in chunks of rows, on rows of a batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from trainkit.core.inside.chunks import Sizes
from trainkit.core.inside.forward import ChunkedForward
from trainkit.core.inside.keep import Keeper
from trainkit.core.strategies import Uniform
from trainkit.errors import TrainkitError
from trainkit.lit.measure.clean import aside
from trainkit.lit.measure.first_rows import FirstRows
from trainkit.lit.measure.passes import Passes

ROWS = 5
LEAST_SHARE = 0.05
"""A module that holds less of the graph's memory is not worth a second pass."""


@dataclass
class _Called:
    """The first call of a submodule, and the bytes that its graph has kept."""

    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    bytes: int = 0


def choose(
    trainer: Any, pl_module: Any, batch: Any, arguments: tuple[Any, Any] | None
) -> list[str]:
    """The outermost submodules whose rows do not see each other, by their paths.

    Args:
        trainer: in `fit`.
        pl_module: what trains.
        batch: the first one.
        arguments: of `training_step` behind the batch; default: Lightning's.

    Raises:
        TrainkitError: there is none.
    """
    if not pl_module.automatic_optimization:
        raise TrainkitError(
            'MicroBatching inside="auto": it runs training_step on a few rows, which a '
            "module with automatic_optimization=False would take a step with. Name the "
            "submodules: inside='path'."
        )
    rows = FirstRows(batch, None, Uniform())
    number = min(ROWS, rows.num_rows)
    few = rows.take(list(range(number)))
    passes = Passes(pl_module, number, dtype=None, as_it_is=True, arguments=arguments)
    reasons: dict[str, str] = {}
    with aside(trainer, pl_module), passes.prepared():
        watch = _Watch(pl_module)
        with watch:
            passes.run(few, range(number))
        found = list(_fitting(pl_module, watch, reasons))
        passes.restore()
    if found:
        return found
    said = "; ".join(f"{path}: {reason}" for path, reason in list(reasons.items())[:3])
    raise TrainkitError(
        f'MicroBatching inside="auto": no submodule of {type(pl_module).__name__} can '
        f"run in chunks of rows. {said or 'None was called with rows.'}. Name one with "
        f"inside='path'."
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


def _fitting(
    module: nn.Module, watch: _Watch, reasons: dict[str, str], path: str = ""
) -> Iterator[str]:
    """The paths of the outermost submodules that fit, from `module` on."""
    called, name = watch.calls.pop(module, None), path or "self"
    if called is not None:
        if called.bytes < LEAST_SHARE * watch.total:
            return
        cut = ChunkedForward(module, name, Sizes(1), Keeper(0))
        try:
            cut.probe(*called.arguments[0], **called.arguments[1])
            yield name
            return
        except TrainkitError as error:
            text = str(error.__cause__ or error).removeprefix(f"{name}: ")
            reasons[name] = text.split(". ")[0]
        except Exception as error:
            reasons[name] = f"{type(error).__name__}: {error}"[:200]
    for name, child in module.named_children():
        yield from _fitting(child, watch, reasons, f"{path}.{name}".lstrip("."))
