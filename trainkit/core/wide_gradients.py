"""The window's gradient in float32, beside parameters of half precision."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainkit.core.gradients import gradients_of, scale_
from trainkit.core.ranks import Ranks, sum_over_ranks_
from trainkit.errors import TrainkitError


class WideGradients:
    """Adds up the gradients of a window in float32, and rounds their sum once.

    A parameter of bfloat16 has a gradient of bfloat16. A sum in its 8 bits loses
    everything smaller than 1/256 of it, so later micro-batches count less and less
    (LLaMA-Factory#9769, NeMo Automodel#341; Megatron-LM keeps float32 for this reason).
    Here a backward pass leaves only its own gradient in the parameter. It is then added
    to a sum in float32 and removed from the parameter.

    torch's own `Tensor.grad_dtype = torch.float32` also makes autograd add up in
    float32, but only in one process: DDP, AdamW and every fused optimizer refuse such
    gradients (torch 2.13).

    >>> weight = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    >>> wide = WideGradients([weight])
    >>> for part in [256.0] + 64 * [1.0]:  # in bfloat16, 256 + 1 is 256
    ...     (weight * part).sum().backward()
    ...     wide.take()
    >>> wide.hand_over()
    >>> weight.grad
    tensor([320.], dtype=torch.bfloat16)

    The sums live as long as the window: its first gradients make them, and `hand_over`
    frees them. They take 4 bytes for each element that has a gradient; sparse gradients
    become dense. Gradients in float32 or float64 are added up here too, in their own
    dtype, since a factor must reach all gradients alike.

    Args:
        parameters: the parameters that train.
        ranks: the ranks that share the window. Passes with and without DDP's
            communication may follow each other in any order: the sums are added up
            over ranks in float32 at the end.

    Raises:
        TrainkitError: neither DDP nor trainkit adds up gradients over ranks.
    """

    def __init__(
        self, parameters: Iterable[Tensor], *, ranks: Ranks | None = None
    ) -> None:
        self._known: dict[int, Tensor] = {}
        self._ranks = ranks = ranks or Ranks()
        self._stand_ins: dict[int, Tensor] = {}
        averages = ranks.ddp is not None and ranks.aggregation == "mean"
        if ranks.backend_sums and not averages:
            ddp = "without DDP" if ranks.ddp is None else "with DDP"
            raise _not_kept(f"aggregation={ranks.aggregation!r} {ddp}")
        self.join(parameters)

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters whose gradients are added up here."""
        return list(self._known.values())

    def join(self, parameters: Iterable[Tensor]) -> None:
        """Add up the gradients of these parameters too, from the next `take` on."""
        for parameter in parameters:
            if isinstance(parameter, DTensor):
                raise _not_kept("a DTensor of fully_shard or tensor parallelism")
            self._known[id(parameter)] = parameter

    def others(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """The parameters that are not added up here."""
        return [p for p in parameters if id(p) not in self._known]

    def stand_in_of(self, parameter: Tensor) -> Tensor:
        """The tensor whose `grad` is a parameter's sum in the window so far, or None.

        It is a leaf in float32, of the parameter's shape and without storage. So all
        that can be done to gradients (scaling, adding up over ranks, a checkpoint) can
        be done to the sums. Valid until the window closes.
        """
        if id(parameter) not in self._stand_ins:
            self._stand_ins[id(parameter)] = _make_stand_in(parameter)
        return self._stand_ins[id(parameter)]

    @property
    def stand_ins(self) -> list[Tensor]:
        """The stand-ins of all parameters, in their order."""
        return [self.stand_in_of(parameter) for parameter in self.parameters]

    @torch.no_grad()
    def take(self) -> None:
        """Add the gradients of the last backward pass, and remove them.

        Nothing here waits for the device.
        """
        for parameter in self.parameters:
            if parameter.grad is None:
                continue
            stand_in = self.stand_in_of(parameter)
            stand_in.grad = _added(stand_in, parameter.grad)
            if self._leaves_zeros:
                parameter.grad.zero_()
            else:  # the next pass then moves its gradient here and adds nothing
                parameter.grad = None

    @torch.no_grad()
    def hand_over(self, scale: Tensor | float | None = None) -> None:
        """Close the window: each `grad` becomes scale * sum, rounded once.

        The sum is over the window's passes. Over ranks it is the mean or sum that the
        backend leaves. A parameter that no micro-batch of any rank has used keeps
        `None`. Every rank must call this, before clipping and before
        `optimizer.step()`.

        Args:
            scale: 0-d, multiplies the sums. It may differ between ranks if the backend
                does nothing to gradients (`aggregation="none"`).
        """
        if not self._leaves_zeros:
            self.take()  # what no pass of the accumulator has left there
        if scale is not None:
            scale_(gradients_of(self.stand_ins), scale)
        if self._ranks.size > 1:
            # Also under DDP: a rank with one micro-batch cannot know that another had
            # more. The mean of equal gradients is that gradient.
            training = [self.stand_in_of(p) for p in self.parameters if p.requires_grad]
            sum_over_ranks_(training, self._ranks, times=1 / self._ranks.multiplier)
        for parameter in self.parameters:
            total = self.stand_in_of(parameter).grad
            del self._stand_ins[id(parameter)]
            parameter.grad = None if total is None else total.to(parameter.dtype)

    def drop(self) -> None:
        """Forget the open window: its sums, and all gradients not yet taken."""
        self._stand_ins.clear()
        for parameter in self.parameters:
            parameter.grad = None

    @property
    def _leaves_zeros(self) -> bool:
        """Whether `take` must leave a `grad` of zeros: with `find_unused_parameters`,
        DDP needs in the last pass the `grad` of what passes under no_sync() have
        used."""
        ddp = self._ranks.ddp
        return ddp is not None and ddp.find_unused_parameters


def _not_kept(received: str) -> TrainkitError:
    return TrainkitError(
        f"wide_gradients=True: works in one process, with DDP that averages, and where "
        f"trainkit adds up (aggregation='none'), received {received}. Leave it out. "
        f"Under FSDP keep the parameters in float32 (precision='bf16-mixed'): so are "
        f"their gradients."
    )


def _make_stand_in(parameter: Tensor) -> Tensor:
    """A leaf of the parameter's shape, at least float32, that takes no memory."""
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    shell = torch.empty((), dtype=dtype, device=parameter.device)
    return shell.expand(parameter.shape).requires_grad_()


def _added(stand_in: Tensor, gradient: Tensor) -> Tensor:
    """The sum with one more gradient; in place if there is a sum already."""
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    if stand_in.grad is not None:
        return stand_in.grad.add_(dense)  # one kernel, no float32 copy
    # copy: a gradient of float32 may be a view of DDP's bucket
    return dense.to(stand_in.dtype, copy=True)
