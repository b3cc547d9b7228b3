"""The inner cut for any loop: a module that runs in chunks of rows."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from trainkit.core.in_place_of import InPlaceOf, check_cut
from trainkit.core.inside.chunks import Sizes
from trainkit.core.inside.forward import ChunkedForward
from trainkit.core.inside.tokens import ByTokens
from trainkit.core.nested import Path
from trainkit.errors import TrainkitError


class Chunked(InPlaceOf):
    """A module that runs in chunks of rows, and whose gradient is the whole batch's.

        with Chunked(model.encoder, size=32):
            loss = contrastive(model(batch))
            loss.backward()

    The module itself is cut: where it is called, the rows of its arguments run `size`
    at a time, without a graph, and once more with one in the backward pass. What calls
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
        shared: names of the arguments that every chunk gets whole.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        size: int | None = None,
        tokens: int | None = None,
        lengths: str | None = None,
        shared: Sequence[Path] = (),
    ) -> None:
        check_cut("Chunked", module, 1 if size is None else size)
        name = f"Chunked({type(module).__name__})"
        if lengths is not None and tokens is None:
            raise TrainkitError(
                f"{name}: lengths={lengths!r} is for a budget of tokens, and none was "
                f"given. Add tokens=, or leave out lengths."
            )
        by_tokens = None if tokens is None else ByTokens(tokens, lengths, size)
        cut = ChunkedForward(module, name, Sizes(size), shared, by_tokens)
        super().__init__(module, cut)
