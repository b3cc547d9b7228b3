"""The forward of a module that runs in chunks of rows."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from trainkit.core._compat import is_transformed, uncompiled
from trainkit.core.batch_norm.layers import listed, normalising_by_batch
from trainkit.core.inside.call import Call
from trainkit.core.inside.check import Checks
from trainkit.core.inside.chunks import Sizes
from trainkit.core.inside.cut import Cut, nothing_around
from trainkit.core.inside.rows import Arguments, Names, read_arguments
from trainkit.core.inside.run import run_in_chunks
from trainkit.core.inside.tokens import ByTokens
from trainkit.core.nested import Path
from trainkit.errors import TrainkitError


class ChunkedForward(Cut):
    """A module's forward, in chunks of rows; it stands on the instance.

    It is an object, not a function: a copy of the module then has a copy of it, which
    runs the copy, and both can be pickled.

    Args:
        module: whose forward is replaced.
        name: of the module, for messages.
        sizes: how large a chunk may be.
        keep: how many chunks keep their graph until the backward pass.
        shared: paths of the arguments that every chunk gets whole.
        by_tokens: cuts by the lengths of rows.

    Attributes:
        was_called: whether it was called to train.
        was_cut: whether a call ran in chunks.
        most_rows: that a call had.
        is_copy: whether it came with a copy of its module, which may be cut anew.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        sizes: Sizes,
        keep: int = 1,
        shared: Sequence[Path] = (),
        by_tokens: ByTokens | None = None,
    ) -> None:
        _remove_copied(module)
        self._before = vars(module).get("forward")
        super().__init__(module, name, sizes, keep)
        self.was_called = self.was_cut = self.is_copy = False
        self.most_rows = 0
        self.by_tokens = by_tokens
        self._shared = {str(path) for path in shared}
        self._names = Names(self.original, self._shared, name)
        self._checks = Checks(self)

    def install(self) -> None:
        """Take the place of the module's forward."""
        _refuse_module(self.module, self.name)
        vars(self.module)["forward"] = self

    def remove(self) -> None:
        """Give the module its own forward back."""
        if vars(self.module).get("forward") is self:
            del vars(self.module)["forward"]
            if self._before is not None:
                vars(self.module)["forward"] = self._before
        if self.by_tokens is not None and sys.exc_info()[0] is None:
            self.by_tokens.padding.read()

    @property
    def original(self) -> Any:
        """The module's own forward."""
        if self._before is not None:
            return self._before
        return type(self.module).forward.__get__(self.module)

    @uncompiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        if not module.training and not torch.is_grad_enabled():
            return self.original(*args, **kwargs)
        if is_transformed():
            raise TrainkitError(
                f"{self.name}: it runs in chunks of rows, which transforms of "
                f"torch.func cannot see through. Use loss.backward(), or do not cut it."
            )
        self.was_called = True
        arguments = read_arguments(args, kwargs, self._names, self.name)
        self.most_rows = max(self.most_rows, arguments.rows)
        if arguments.rows <= 1 or self.by_tokens is None and self._is_one(arguments):
            return self.original(*args, **kwargs)
        self._refuse_batch_norm()
        self.was_cut = True
        if self.by_tokens is not None:
            return self._by_tokens(arguments, self.by_tokens)
        plan, is_checked = self._checks.find(arguments, self.sizes)
        return run_in_chunks(Call(self, arguments, plan, is_checked=is_checked))

    def _is_one(self, arguments: Arguments) -> bool:
        sizes = self.sizes
        return not sizes.is_auto and arguments.rows <= (sizes.limit or 0)

    def _refuse_batch_norm(self) -> None:
        if found := normalising_by_batch(self.module):
            names = [each or "the module itself" for each in found]
            raise TrainkitError(
                f"{self.name}: its rows must not see each other, and BatchNorm "
                f"normalises by all rows of a batch: {listed(names)}. Freeze it, use "
                f'BatchNormGuard("exact"), or name a module without it.'
            )

    def _by_tokens(self, arguments: Arguments, by_tokens: ByTokens) -> Any:
        """Run rows of like length together."""
        ordered = by_tokens.sort(arguments, self.name)
        if len(ordered.chunks) == 1:
            return self.run(arguments, arguments.values)
        arguments = replace(arguments, values=ordered.values(arguments))
        sizes = by_tokens.sizes(ordered.width)
        plan, is_checked = self._checks.find(arguments, sizes)
        arguments, plan = by_tokens.trimmed(
            self, arguments, plan, ordered, looks=is_checked
        )
        call = Call(
            self,
            arguments,
            plan,
            chunks=ordered.chunks,
            width=ordered.width,
            is_checked=is_checked,
            padding=by_tokens.padding,
        )
        return run_in_chunks(call, lambda leaves: ordered.restored(leaves, plan))

    def probe(self, *args: Any, **kwargs: Any) -> None:
        """Refuse a module that cannot run in chunks, as one call of it shows."""
        _refuse_module(self.module, self.name)
        arguments = read_arguments(args, kwargs, self._names, self.name)
        self._refuse_batch_norm()
        self._checks.look(arguments, self.sizes)

    def __getstate__(self) -> dict[str, Any]:
        """A copy begins anew: what it has seen holds graphs."""
        anew = {"around": nothing_around, "_shadows": None, "differs": None}
        return {**vars(self), **anew, "is_copy": True, "_checks": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _checks=Checks(self))


def _remove_copied(module: nn.Module) -> None:
    """Give a copy of a module that ran in chunks its own forward back."""
    forward = vars(module).get("forward")
    if isinstance(forward, ChunkedForward) and forward.is_copy:
        forward.remove()


def _refuse_module(module: nn.Module, name: str) -> None:
    if any(is_lazy(each) for each in module.parameters()):
        raise TrainkitError(
            f"{name}: its parameters must have a shape, and lazy ones get theirs in a "
            f"first forward pass. Run one batch before it is cut."
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise TrainkitError(
            f"{name}: a scripted module cannot run in chunks. Give the module that was "
            f"scripted."
        )
    if isinstance(vars(module).get("forward"), ChunkedForward):
        raise TrainkitError(
            f"{name}: it runs in chunks already. Name it once, and remove() the first."
        )
    if module._compiled_call_impl is not None:
        raise TrainkitError(
            f"{name}: it was compiled in place by compile(), which would trace the "
            f"cut. Write module = torch.compile(module) instead, and cut that."
        )
