"""The submodules of a module that run in chunks of rows while `fit` runs."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

from torch import nn

from trainkit.core.batch_norm.layers import BatchNorm, listed
from trainkit.core.documents import find_flattened
from trainkit.core.inside.forward import ChunkedForward
from trainkit.core.inside.rows import Sizes
from trainkit.core.inside.tokens import ByTokens
from trainkit.core.ranks import Ranks
from trainkit.core.split.micro_batching import SELF, MicroBatching
from trainkit.core.strategies import num_samples
from trainkit.core.tape.forward import TapedForward
from trainkit.errors import TrainkitError
from trainkit.lit.batch_size import micro_batch_of
from trainkit.lit.callback.table import Row, say
from trainkit.lit.inside.choose import choose
from trainkit.lit.inside.refusals import refused_logs


class InsideCuts:
    """Replaces the forward of the named submodules, and gives it back.

    Args:
        pl_module: what trains.
        options: with `inside`.

    Attributes:
        cuts: the forwards that run in chunks; none before they were found.
        paths: of the submodules; none before they were found.
        is_checked: whether a training step has run, and has called them.
    """

    def __init__(self, pl_module: Any, options: MicroBatching) -> None:
        self._module, self._options = pl_module, options
        self._sizes = Sizes(options.size)
        self.cuts: list[ChunkedForward | TapedForward] = []
        self.paths: list[str] = []
        self.is_checked = False
        self._ranks: Ranks | None = None

    def start(self) -> None:
        """Cut the submodules that are named; `"auto"` waits for the first batch."""
        if self._options.inside != "auto":
            self._install(self._options.inside_paths)

    def join_statistics(self, ranks: Ranks) -> None:
        """Let BatchNorm layers see all chunks of a call, and those of these ranks."""
        has_begun = bool(self.cuts)
        self.stop()
        self._ranks = ranks
        if has_begun:
            self._install(self.paths)

    def stop(self) -> None:
        """Give all submodules their own forward back."""
        for cut in reversed(self.cuts):
            cut.remove()
        self.cuts, self._ranks = [], None

    def find(self, trainer: Any, windows: Any, batch: Any) -> None:
        """Find submodules on rows of the first batch, if none is cut yet."""
        if self.cuts:
            return
        paths = choose(trainer, self._module, windows, batch, trainer.callbacks)
        self._install(paths)
        say(trainer, ("inside", f'found by inside="auto": {listed(paths)}'))

    def _install(self, paths: Sequence[str]) -> None:
        self.paths = list(paths)
        for path in paths:
            cut = self._cut(_submodule(self._module, path), path)
            cut.refused = refused_logs(self._module, cut.module, path)
            cut.install()
            self.cuts.append(cut)

    def _cut(self, module: nn.Module, path: str) -> ChunkedForward | TapedForward:
        options = self._options
        by_tokens = _by_tokens(options)
        has_layers = any(isinstance(each, BatchNorm) for each in module.modules())
        if self._ranks is None or not has_layers:
            of = self._sizes, options.shared, by_tokens, options.documents
            return ChunkedForward(module, path, *of)
        if by_tokens is not None or options.shared:
            raise TrainkitError(
                f"{path}: exact BatchNorm cuts every argument as long as the first "
                f"tensor, with its padding, received tokens={options.tokens}, "
                f"shared={list(options.shared)!r}. Cut by size= alone; give what all "
                f"rows need as an attribute or parameter of the module."
            )
        return TapedForward(module, self._sizes, self._ranks, path)

    def check_called(self, batch: Any) -> None:
        """Warn of submodules that the first training step has not called with the rows
        of the batch."""
        self.is_checked = True
        how = self._options.documents
        rows = float(num_samples(batch, how))
        if math.isnan(rows):  # lists of samples do not tell: the loader does
            rows = float(micro_batch_of(self._module.trainer.train_dataloader) or 1)
        is_flat = find_flattened(batch, how) is not None
        for cut in self.cuts:
            if cut.was_cut or cut.most_rows >= rows:
                continue
            text = (
                f"trainkit | inside: {cut.name} ran whole. Of a loader batch of "
                f"{rows:g} rows or documents, training_step calls it with "
                f"{cut.most_rows}. Only calls of the module itself are cut, such as "
                f"self.net(x), and rows are the first dimension of its tensors, not "
                f"the samples of a list. Documents of one row are told apart by an "
                f"argument: offsets by the name cu_seq_lens_q, numbers as seq_idx, "
                f"position_ids that begin anew, or what documents= names (exact "
                f"BatchNorm cuts rows alone). Name a submodule that is called so; or "
                f"cut documents by MicroBatching(tokens=...) without inside=."
            )
            if is_flat and cut.most_rows:
                raise TrainkitError(text)
            warnings.warn(text, stacklevel=2)

    # ---- what others ask -------------------------------------------------------------

    @property
    def names(self) -> str:
        """The paths of the submodules, for messages."""
        return listed(self.paths)

    @property
    def size(self) -> int | None:
        """The most rows in a chunk, if there is a limit."""
        return self._sizes.limit

    def table_row(self, *, has_strategy: bool, num_ranks: int) -> Row:
        """How the step runs, for the table before training."""
        options = self._options
        names = listed(list(options.inside_paths))
        what = "the modules found" if options.inside == "auto" else names
        rows = options.unit if options.unit == "rows" else "documents or packed rows"
        limits = {rows: options.size, "tokens": options.tokens}
        said = [f"{limit} {unit}" for unit, limit in limits.items() if limit]
        how = f"at most {' and '.join(said)}" if said else "as many rows as fit"
        alike = "; the losses of the ranks count alike"
        return (
            "inside",
            f"training_step runs once on the whole loader batch; {what} in chunks of "
            f"{how}, and once more in the backward pass"
            f"{alike * (num_ranks > 1 and not has_strategy)}",
        )

    def state_dict(self) -> dict[str, Any]:
        """The size that was found, for a checkpoint."""
        return {"limit": self._sizes.limit}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin with a size that was found before."""
        if self._sizes.is_auto:
            self._sizes.limit = state.get("limit")


def _by_tokens(options: MicroBatching) -> ByTokens | None:
    if options.tokens is None:
        return None
    paths = options.length_paths
    if len(paths) > 1:
        raise TrainkitError(
            f"MicroBatching lengths: with inside= it names one argument of the "
            f"submodule, received {options.lengths!r}."
        )
    return ByTokens(options.tokens, str(paths[0]) if paths else None, options.size)


def _submodule(pl_module: nn.Module, path: str) -> nn.Module:
    if path == SELF:
        return pl_module
    try:
        return pl_module.get_submodule(path)
    except AttributeError as error:
        names = [name for name, _ in pl_module.named_children()]
        raise TrainkitError(
            f"MicroBatching inside: must be the path of a submodule, and "
            f"{type(pl_module).__name__} has none at {path!r}. It has "
            f"{listed(names, at_most=9) or 'no submodule'}."
        ) from error
