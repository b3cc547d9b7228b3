"""One call of a module that runs in chunks of rows: its forward and backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trainkit.core.generators import States
from trainkit.core.inside.chunks import Chunk, Sizes
from trainkit.core.inside.closeness import are_close
from trainkit.core.inside.cut import Cut, Node
from trainkit.core.inside.moment import Moment
from trainkit.core.inside.outputs import Plan, join
from trainkit.core.inside.rows import Arguments
from trainkit.core.inside.shadows import Shadows, strangers_of
from trainkit.core.nested import Build
from trainkit.core.out_of_memory import in_smaller_parts
from trainkit.errors import TrainkitError


class Call:
    """One call of a module, cut into chunks of rows.

    Args:
        cut: what is called.
        arguments: of the call.
        moment: what the module was like.
        plan: how outputs are joined.
        sizes: of chunks.
        has_graph: whether it has a backward pass.
        is_checked: whether the outputs of its two passes are compared.
        is_trial: whether its rows are only looked at.

    Attributes:
        name: of the module, for messages.
        build: makes the output of its leaves.
        saved: the tensors among the arguments, until autograd holds them.
        differentiable: which tensors of the output have a gradient.
    """

    def __init__(
        self,
        cut: Cut,
        arguments: Arguments,
        moment: Moment,
        plan: Plan,
        sizes: Sizes,
        *,
        has_graph: bool,
        is_checked: bool = False,
        is_trial: bool = False,
    ) -> None:
        self._cut, self._plan, self._moment, self.name = cut, plan, moment, cut.name
        self._sizes, self._has_graph = sizes, has_graph
        self._is_checked, self._is_trial = is_checked, is_trial
        self.saved = [x for x in arguments.values if isinstance(x, Tensor)]
        self._inputs = [*moment.parameters, *arguments.trained] if has_graph else []
        self._shadows = Shadows(cut.module, self._inputs)
        trained = iter(self._shadows.own[len(moment.parameters) :])
        self._arguments = arguments.with_trained(trained)
        self.build: Build | None = None
        self.differentiable: list[bool] = []
        self._has_gradient: list[bool] = []  # by the leaves of the output
        self._tensors: list[int] = []  # the places of those that are tensors
        self._chunks: list[Chunk] = []
        self._kept: list[Any] | None = None
        self._first: list[Any] | None = None

    def _states(self) -> States:
        return States(self._arguments.devices)

    # ---- forward ---------------------------------------------------------------------

    def leaves(self) -> list[Any]:
        """Run all chunks; the leaves of the output, as autograd sees them."""
        leaves = self.run()
        self._moment.check_state()
        if not self._inputs:
            return leaves
        tensors = [leaves[i] for i in self._tensors]
        outputs: Any = Node.apply(self, tensors, *self._inputs)
        self._inputs = []  # autograd holds them
        for place, output in zip(self._tensors, outputs, strict=True):
            leaves[place] = output
        return leaves

    def run(self) -> list[Any]:
        """Run all chunks; the leaves of the output. The last chunk keeps its graph,
        which shows what of the output has a gradient."""
        with torch.no_grad():
            put_back = self._states().put_back
            leaves = in_smaller_parts(self._run, self._halves, put_back)
        self._tensors = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        self.differentiable = [self._has_gradient[i] for i in self._tensors]
        return leaves

    def _run(self) -> list[Any]:
        outputs = []
        self._chunks = self._arguments.chunks(self._sizes)
        self._kept = self._first = None
        self._has_gradient = [False] * len(self._plan)
        for chunk in self._chunks:
            chunk.states = self._states()
            if self._has_graph and chunk is self._chunks[-1]:
                outputs.append(self._keep(chunk))
            else:
                outputs.append(self._outputs(chunk))
        self._ended = self._states()
        if self._is_checked and len(outputs) > 1:
            self._first = outputs[0]
        width = self._arguments.width
        return join(self._plan, self._chunks, outputs, self.name, width)

    def _keep(self, chunk: Chunk) -> list[Any]:
        """Run the last chunk, and keep its graph."""
        if torch.is_autocast_cache_enabled():
            # It holds casted weights, without a graph if they were made without.
            torch.clear_autocast_cache()
        with self._shadows.in_place(), torch.enable_grad():
            self._kept = outputs = self._outputs(chunk)
        strangers_of(outputs, self._shadows.own, self.name)
        for index, each in enumerate(outputs[: len(self._plan)]):
            self._has_gradient[index] = isinstance(each, Tensor) and each.requires_grad
        return outputs

    def _halves(self) -> bool:
        arguments = self._arguments
        return arguments.by_length is None and self._sizes.halve(arguments.rows)

    def _outputs(self, chunk: Chunk) -> list[Any]:
        """What the module returns for a chunk."""
        of = (None, None) if self._is_trial else (self, chunk)
        given = self._arguments.of(chunk)
        fields, build = self._cut.run(self._arguments, given, *of)
        self.build = self.build or build  # it holds outputs: the first have no graph
        return [field.value for field in fields]

    # ---- backward --------------------------------------------------------------------

    def backward(
        self, saved: Sequence[Tensor], given: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """One gradient for each parameter that trains, then for each argument.

        Args:
            saved: the tensors among the arguments, which autograd found unchanged.
            given: the gradients of the tensors of the output.
        """
        self._moment.check_weights()
        gradients: list[Tensor | None] = [None] * len(self._plan)
        for place, gradient in zip(self._tensors, given, strict=True):
            gradients[place] = gradient
        self._refuse_padding(gradients)
        kept, now = [self._kept], self._states()
        self._kept = None

        def begin_again() -> None:
            kept.clear()
            self._shadows.clear()
            now.put_back()

        run = partial(self._pass, gradients, kept)
        try:
            with self._moment.again(), self._shadows.in_place():
                in_smaller_parts(run, self._may_begin_again, begin_again)
                return self._shadows.gradients()
        finally:
            self._shadows.clear()

    def _pass(
        self, gradients: Sequence[Tensor | None], kept: list[list[Any] | None]
    ) -> None:
        """Run the backward pass of all chunks; the last comes first: it is kept."""
        for chunk in reversed(self._chunks):
            outputs = (kept.pop() if kept else None) or self._again(chunk)
            self._pull(chunk, outputs, gradients)
            del outputs  # not beside the next one

    def _again(self, chunk: Chunk) -> list[Any]:
        """Run a chunk once more, with a graph and the draws of its first run. What the
        backward pass draws is another draw for each chunk."""
        now = None if self._chunks[0].states.are(self._ended) else self._states()
        if now is not None:
            chunk.states.put_back()
        try:
            with torch.enable_grad():
                outputs = self._outputs(chunk)
        finally:
            if now is not None:
                now.put_back()
        if not chunk.start:
            self._compare(outputs)
        return outputs

    def _compare(self, outputs: Sequence[Any]) -> None:
        """Refuse other outputs of the first chunk than in the forward pass."""
        first, self._first = self._first or (), None
        for one, other in zip(first, outputs, strict=False):
            if isinstance(one, Tensor) and not are_close(one, other):
                raise TrainkitError(
                    f"{self.name}: a chunk of rows gives other outputs when it runs "
                    f"again in the backward pass. Its forward must not change anything "
                    f"that it depends on, and must not draw from a generator of its "
                    f"own. Name a module within it that does not."
                )

    def _may_begin_again(self) -> bool:
        """Whether the rows can run in smaller chunks. Those that drew would draw
        otherwise than in the forward pass."""
        states = self._chunks[0].states
        if not states.are(self._ended) or not self._halves():
            return False
        self._first, self._chunks = None, self._sizes.cut(self._arguments.rows)
        for chunk in self._chunks:
            chunk.states = states
        return True

    def _refuse_padding(self, gradients: Sequence[Tensor | None]) -> None:
        """Refuse a gradient where the output was left out; waits for the device."""
        for gradient, joint in zip(gradients, self._plan, strict=True):
            if gradient is None or not joint.padded:
                continue
            of_joint = joint.dim, joint.multiple, joint.padded
            parts = [chunk.part(gradient, *of_joint) for chunk in self._chunks]
            if gradient.count_nonzero() > sum([each.count_nonzero() for each in parts]):
                raise TrainkitError(
                    f"{self.name}: {joint.name} at padding is used by the loss, and "
                    f"with tokens= it is 0 where no row of a chunk needs it. Give "
                    f"padding no weight in the loss (a mask marks tokens by 1 or "
                    f"True), or cut by size= alone."
                )

    def _pull(
        self, chunk: Chunk, outputs: list[Any], gradients: Sequence[Tensor | None]
    ) -> None:
        """Run the backward pass of a chunk."""
        ends, given = [], []
        for output, joint, gradient, is_expected in zip(
            outputs, self._plan, gradients, self._has_gradient, strict=True
        ):
            if not (isinstance(output, Tensor) and output.requires_grad):
                continue
            if not is_expected:
                raise TrainkitError(
                    f"{self.name}: {joint.name} has a gradient in some chunks of rows "
                    f"and none in others. Name a module within it, or around it."
                )
            if joint.dim is not None and gradient is not None:
                gradient = chunk.part(gradient, joint.dim, joint.multiple, joint.padded)
            elif chunk.stop < self._arguments.rows:
                continue  # a value that all chunks share is the last one's
            if gradient is not None:
                ends.append(output)
                given.append(gradient)
        if ends:
            torch.autograd.backward(ends, given)
