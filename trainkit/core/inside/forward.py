"""The inner cut for any loop: the forward of a module that runs in chunks of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.core._compat import transform, uncompiled
from trainkit.core.document_fields import KNOWN
from trainkit.core.inside.call import Call
from trainkit.core.inside.check import look
from trainkit.core.inside.cut import Cut, InPlaceOf, check_cut
from trainkit.core.inside.documents import by_documents
from trainkit.core.inside.outputs import Plan
from trainkit.core.inside.refusals import OF_ROWS, refuse_parts
from trainkit.core.inside.rows import Arguments, Signature, Sizes
from trainkit.core.inside.tokens import ByTokens, Sorted
from trainkit.core.nested import Path
from trainkit.errors import TrainkitError

FLAGS = frozenset({bool, str})
"""What of a module's attributes makes another kind of call."""


class ChunkedForward(Cut):
    """A module's forward, in chunks of rows, each of which runs by itself.

    Args:
        module: whose forward is replaced.
        name: of the module, for messages.
        sizes: how large a chunk may be.
        shared: paths of the arguments that every chunk gets whole.
        by_tokens: cuts by the lengths of rows.
        documents: the argument that tells documents of one row apart; `"auto"` looks
            for it, `"off"` for none.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        sizes: Sizes,
        shared: Path | Sequence[Path] = (),
        by_tokens: ByTokens | None = None,
        documents: str = "auto",
    ) -> None:
        super().__init__(module, name, sizes)
        self.by_tokens = by_tokens
        self._documents = documents
        several = shared if isinstance(shared, tuple | list) else [shared]
        paths = [str(path) for path in several]
        self._signature = Signature(self.original, paths, name)
        self._kinds: dict[Any, tuple[Plan, int]] = {}

    def install(self) -> None:
        """Take the place of the module's forward."""
        refuse_parts(self.module, self.name, OF_ROWS)
        if isinstance(vars(self.module).get("forward"), ChunkedForward):
            raise TrainkitError(
                f"{self.name}: it runs in chunks already. Name it once, and remove() "
                f"the first."
            )
        super().install()

    @uncompiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.trains:
            return self.original(*args, **kwargs)
        if transform() is not None:
            raise TrainkitError(
                f"{self.name}: it runs in chunks of rows, which transforms of "
                f"torch.func cannot see through. Use loss.backward(), or do not cut it."
            )
        arguments, sizes = self._read(args, kwargs), self.sizes
        self.most_rows = max(self.most_rows, arguments.rows)
        most = 1 if self.by_tokens or sizes.is_auto else sizes.limit or 1
        if arguments.rows <= most:
            return self.original(*args, **kwargs)
        self.was_cut = True
        if self.by_tokens and not arguments.by:
            arguments = self.by_tokens.sort(arguments, self.name)
        call = Call(self, arguments)
        call.plan, call.is_checked = self._find(call)
        leaves = call.leaves()
        if isinstance(arguments, Sorted):
            leaves = arguments.restored(leaves, call.plan)
        assert call.build is not None
        return call.build(iter(leaves))

    def probe(self, *args: Any, **kwargs: Any) -> None:
        """Refuse a module that cannot run in chunks, as one call of it shows."""
        look(Call(self, self._read(args, kwargs)))

    def _read(self, args: Any, kwargs: Any) -> Arguments:
        arguments, how = self._signature.read(args, kwargs), self._documents
        is_plain = arguments.build is None and KNOWN.isdisjoint(arguments.paths)
        if how == "off" or is_plain and how == "auto":
            return arguments  # no name tells documents apart
        return by_documents(arguments, how, self.by_tokens, self.name)

    def _find(self, call: Call) -> tuple[Plan, bool]:
        """How a call is joined, and whether it was looked at now.

        Calls of one kind have modes and flags in common, what trains, and which
        arguments have rows.
        """
        arguments = call.arguments
        values = zip(arguments.paths, arguments.values, arguments.axes, strict=True)
        key = (
            torch.is_grad_enabled(),
            *[x for x in call.moment.settings.values() if type(x) in FLAGS],
            *map(id, call.parameters),
            *[(path, axes, _kind(value)) for path, value, axes in values],
            arguments.by,
        )
        plan, before = self._kinds.get(key, (None, 0))
        is_checked = not before & (before + 1)  # calls 1, 2, 4, 8, ...
        if plan is None or is_checked:
            plan = look(call)
        self._kinds[key] = plan, before + 1
        return plan, is_checked

    def __getstate__(self) -> dict[str, Any]:
        """A copy begins anew: what it has seen holds graphs."""
        return {**super().__getstate__(), "_kinds": {}}


def _kind(value: Any) -> Any:
    """What calls of one kind have in common of an argument: of a flag its value."""
    if isinstance(value, Tensor):
        return value.ndim
    return value if type(value) in FLAGS else type(value)


class Chunked(InPlaceOf):
    """A module that runs in chunks of rows, and whose gradient is the whole batch's.

        with Chunked(model.encoder, size=32):
            loss = contrastive(model(batch))
            loss.backward()

    The module itself is cut: where it is called, the rows of its arguments run `size`
    at a time, without a graph, and once more with one in the backward pass. The rows of
    a flattened batch are its documents, if an argument tells them apart. What calls
    it sees all rows at once, so that any loss is the loss of the whole batch. `remove`,
    or the end of the `with` block, gives the module its own forward back.

    Forward hooks on the module run once; those on modules within it run for each chunk,
    and again in the backward pass. The `use_cache` of a model of transformers is off
    while it runs in chunks: pass `use_cache=True` and it is refused. Lists of
    tensors are not cut: every chunk gets the whole list.

    This object has the module's parameters under their own names, and can be called in
    its place. The first tensor among the arguments tells how many rows there are: what
    is as long is cut, unless `shared` names it.

    Args:
        module: whose rows do not see each other.
        size: the most rows in a chunk; None: as many as fit in memory.
        tokens: the most tokens in a chunk. Rows of like length then run together,
            without the columns that are padding in all of them. The outputs are 0
            there, and the loss must give padding no weight.
        lengths: the name of the argument that tells rows from padding: a mask, in which
            1 or True marks tokens; default: `"attention_mask"`.
        shared: names of the arguments that every chunk gets whole, or one name.
        documents: the argument that tells documents of one row apart, of which a chunk
            then has some; `"auto"` looks for `cu_seq_lens_q`, `position_ids` and
            others, `"off"` for none.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        size: int | None = None,
        tokens: int | None = None,
        lengths: str | None = None,
        shared: Path | Sequence[Path] = (),
        documents: str = "auto",
    ) -> None:
        check_cut("Chunked", module, 1 if size is None else size)
        name = f"Chunked({type(module).__name__})"
        if lengths is not None and tokens is None:
            raise TrainkitError(
                f"{name}: lengths={lengths!r} is for a budget of tokens, and none was "
                f"given. Add tokens=, or leave out lengths."
            )
        by_tokens = None if tokens is None else ByTokens(tokens, lengths, size)
        of = Sizes(size), shared, by_tokens, documents
        cut = ChunkedForward(module, name, *of)
        super().__init__(module, cut)
