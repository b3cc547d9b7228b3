"""The window's gradient in float32, beside parameters of half precision."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainkit.core.gradients import gradients_of, scale_, sum_over_ranks_
from trainkit.core.ranks import Ranks
from trainkit.errors import TrainkitError


class WideGradients:
    """Adds up the gradients of a window in float32, and rounds their sum once.

    A parameter of bfloat16 has a gradient of bfloat16, and a sum kept in 8 bits loses
    what is smaller than 1/256 of it: of 64 micro-batches the later ones, bit by bit
    (LLaMA-Factory#9769, NeMo Automodel#341; Megatron-LM keeps float32 for this reason).
    Here each backward pass leaves its own gradient alone in the parameter, which is
    added to a sum in float32 and taken away.

    torch's own `Tensor.grad_dtype = torch.float32` makes autograd do the same, but only
    for one process: DDP and FSDP2 refuse such gradients, and so do AdamW and every
    fused optimizer (torch 2.13).

    >>> weight = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    >>> wide = WideGradients([weight])
    >>> for part in [256.0] + 64 * [1.0]:  # in bfloat16, 256 + 1 is 256
    ...     (weight * part).sum().backward()
    ...     wide.take()
    >>> wide.hand_over()
    >>> weight.grad
    tensor([320.], dtype=torch.bfloat16)

    The sums live as long as the window: made by its first gradients, without a pass to
    fill them with zeros, and given back to the allocator when the optimizer steps. They
    take 4 bytes for each element that has a gradient. Parameters of float32 or float64
    are added up here too, in their own dtype: a factor must reach all gradients alike.

    Args:
        parameters: those whose gradients make the window.
        ranks: those that share it. Passes that DDP has synchronised and others may
            follow each other as they like: the sums meet in float32 at the end.

    Raises:
        TrainkitError: gradients meet over ranks in a way that is unknown, or that does
            not leave them in `grad` after each pass (FSDP1).
    """

    def __init__(
        self, parameters: Iterable[Tensor], *, ranks: Ranks | None = None
    ) -> None:
        self._known: dict[int, Tensor] = {}
        self._ranks = ranks or Ranks()
        self._stand_ins: dict[int, Tensor] = {}
        self.join(parameters)

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters whose gradients are added up here."""
        return list(self._known.values())

    def join(self, parameters: Iterable[Tensor]) -> None:
        """Add up the gradients of these too, from the next `take` on: finetuning lets
        parameters train that did not when training began."""
        new = {id(p): p for p in parameters if id(p) not in self._known}
        if self._ranks.backend_sums and self._ranks.ddp is None:
            _refuse_unknown_backend(new.values())
        self._known.update(new)

    def others(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """The parameters that are not added up here."""
        return [p for p in parameters if id(p) not in self._known]

    def stand_in_of(self, parameter: Tensor) -> Tensor:
        """What holds a parameter's sum: its `grad` is the window's so far, or None.

        A leaf in float32, of the parameter's shape and without storage, so that what is
        done to gradients (scaling, adding up over ranks, a checkpoint) can be done to
        the sums. Valid until the window closes.
        """
        if id(parameter) not in self._stand_ins:
            self._stand_ins[id(parameter)] = _make_stand_in(parameter)
        return self._stand_ins[id(parameter)]

    @property
    def stand_ins(self) -> list[Tensor]:
        """The stand-ins of all parameters, in their order."""
        return [self.stand_in_of(parameter) for parameter in self.parameters]

    @torch.no_grad()
    def take(self, factor: Tensor | None = None, *, is_shared: bool = False) -> None:
        """Add the gradients of the backward pass that is over, and take them away.

        Nothing here waits for the device.

        Args:
            factor: 0-d, what the pass is multiplied by, never rounded to half
                precision. Of a shared pass, the same on all ranks: it multiplies what
                is no longer this rank's own.
            is_shared: the backend has brought this pass together over ranks.
        """
        used = [p for p in self.parameters if p.grad is not None]
        if used and is_shared and self._adds_over_ranks:
            factor = self._counted_once(factor, used[0].device)
        like = cache(
            lambda device, dtype: None if factor is None else factor.to(device, dtype)
        )
        for parameter in used:
            assert parameter.grad is not None
            stand_in = self.stand_in_of(parameter)
            cast = like(stand_in.device, stand_in.dtype)
            stand_in.grad = _added(stand_in, parameter.grad, cast)
            if self._leaves_zeros:
                parameter.grad.zero_()
            else:  # the next pass then moves its gradient here and adds nothing
                parameter.grad = None

    @torch.no_grad()
    def hand_over(self, scale: Tensor | None = None) -> None:
        """Close the window: each `grad` becomes scale * sum, rounded once.

        The sum is over the window's passes, and over ranks what the backend makes of
        them: their mean where it leaves the mean. A parameter that no micro-batch of
        any rank has used keeps `None`. To be called by every rank, before clipping and
        before `optimizer.step()`.

        Args:
            scale: 0-d, what the sums are multiplied by. It may differ between ranks
                where the backend does nothing to gradients (`aggregation="none"`).
        """
        if not self._leaves_zeros:
            self._refuse_not_taken()
        if scale is not None:
            scale_(gradients_of(self.stand_ins), scale)
        if self._adds_over_ranks:
            training = [self.stand_in_of(p) for p in self.parameters if p.requires_grad]
            sum_over_ranks_(training, self._ranks, times=1 / self._ranks.multiplier)
        for parameter in self.parameters:
            total = self.stand_in_of(parameter).grad
            del self._stand_ins[id(parameter)]
            parameter.grad = None if total is None else total.to(parameter.dtype)

    def drop(self) -> None:
        """Forget the open window: its sums, and what no `take` has come for."""
        self._stand_ins.clear()
        for parameter in self.parameters:
            parameter.grad = None

    @property
    def _leaves_zeros(self) -> bool:
        """Whether `grad` must stay: DDP that looks for unused parameters remembers what
        a pass under no_sync() has used, and wants its gradient in the last pass."""
        ddp = self._ranks.ddp
        return ddp is not None and ddp.find_unused_parameters

    @property
    def _adds_over_ranks(self) -> bool:
        """Whether sums must meet at the end, as not every pass has been shared.

        All ranks must act alike, and a rank of one micro-batch cannot see that another
        had more: under DDP always. The mean of equal gradients is that gradient.
        """
        ranks = self._ranks
        return ranks.size > 1 and (ranks.aggregation == "none" or ranks.ddp is not None)

    def _counted_once(
        self, factor: Tensor | None, device: torch.device
    ) -> Tensor | None:
        """For a pass that has left its sum on every rank, where all are added up."""
        if self._ranks.aggregation != "sum":
            return factor
        share = torch.full((), 1 / self._ranks.size, device=device)
        return share if factor is None else share * factor.to(device)

    def _refuse_not_taken(self) -> None:
        left = [p for p in self.parameters if p.grad is not None]
        if left:
            raise TrainkitError(
                f"hand_over(): {len(left)} parameters, the first of shape "
                f"{list(left[0].shape)}, have a gradient that is in no sum, and it "
                f"would be lost. Call take() after each backward pass."
            )


def _refuse_unknown_backend(parameters: Iterable[Tensor]) -> None:
    """Refuse parameters that neither DDP nor FSDP2 brings together."""
    plain = [p for p in parameters if not isinstance(p, DTensor)]
    if plain:
        raise TrainkitError(
            f"WideGradients: {len(plain)} parameters, the first of shape "
            f"{list(plain[0].shape)}, meet over ranks by neither DDP nor FSDP2 "
            f"(fully_shard), so nothing shows whether a pass has brought their "
            f"gradients together. Use one of these and pass it as module=; or leave "
            f"the gradients in half precision."
        )


def _make_stand_in(parameter: Tensor) -> Tensor:
    """A leaf of the parameter's shape, at least float32, that takes no memory."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    shell = torch.empty((), dtype=dtype, device=local.device).expand(local.shape)
    if isinstance(parameter, DTensor):
        shell = DTensor.from_local(
            shell,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    return shell.requires_grad_()


def _added(stand_in: Tensor, gradient: Tensor, factor: Tensor | None) -> Tensor:
    """The sum with one more gradient; in place, where there is a sum."""
    total = stand_in.grad
    if total is not None and not gradient.is_sparse and not total.is_sparse:
        # One kernel each, no copy in float32; a 0-d factor does not widen or narrow it.
        if factor is None:
            return total.add_(gradient)
        return total.addcmul_(gradient, factor)
    # copy: a gradient of float32 may be a view of DDP's bucket
    wide = gradient.to(stand_in.dtype, copy=True)
    if factor is not None:
        wide.mul_(factor)
    if total is None:
        return wide
    if total.is_sparse and not wide.is_sparse:
        total = total.to_dense()
    return total.add_(wide)
