"""The forward of a layer, or of a module around it, that asks who runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from torch import Tensor, nn

from trainkit.core._compat import backward_pass, uncompiled
from trainkit.core.joins.branches import current
from trainkit.core.joins.joint_graph import meet, normalised
from trainkit.core.joins.layers import Sharing, normalises_by_batch
from trainkit.core.joins.statistics import move_running
from trainkit.core.joins.transport import OnDevice
from trainkit.errors import TrainkitError


class Interception(Protocol):
    """Takes the place of forwards, and gives it back."""

    def install(self) -> None: ...

    def remove(self) -> None: ...


Installed = TypeVar("Installed", bound=Interception | None)


@contextmanager
def installed(interception: Installed) -> Iterator[Installed]:
    """Within it, an interception is there, if there is one."""
    if interception is None:
        yield interception
        return
    interception.install()
    try:
        yield interception
    finally:
        interception.remove()


class Intercepted:
    """A module's forward while windows run; it stands on the instance.

    Where a micro-batch that may wait for the others calls the module, the owner of its
    branch decides what happens. Elsewhere a layer sees a window of one micro-batch,
    over all ranks, and other modules run as they are.

    Args:
        module: whose forward is replaced.
        name: of it, for messages.
        sharing: which ranks share statistics.

    Attributes:
        before: the forward that stood on the instance; None if none did.
    """

    def __init__(self, module: nn.Module, name: str, sharing: Sharing) -> None:
        self.module, self.name = module, name
        self._sharing = sharing
        self.before = vars(module).get("forward")

    def __getstate__(self) -> dict[str, Any]:
        """A copy shares statistics with no other rank."""
        return {**vars(self), "_sharing": Sharing()}

    @property
    def normalises(self) -> bool:
        """Whether it is a layer that normalises by the batch at present."""
        return normalises_by_batch(self.module)

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward."""
        if self.before is not None:
            return self.before(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def install(self) -> None:
        """Take the place of the module's forward."""
        vars(self.module)["forward"] = self

    def remove(self) -> None:
        """Give the module its own forward back, or to what has come in its place."""
        above: Any = vars(self.module).get("forward")
        while above is not self and hasattr(above, "before"):
            if above.before is self:
                above.before = self.before
            above = above.before
        if vars(self.module).get("forward") is self:
            del vars(self.module)["forward"]
            if self.before is not None:
                vars(self.module)["forward"] = self.before

    @uncompiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        branches = current()
        if branches is not None and branches.owner is not None:
            return branches.owner.called(self, args, kwargs)
        if not self.normalises:
            return self.original(*args, **kwargs)
        if backward_pass() >= 0:
            raise TrainkitError(
                f"{self.name}: it ran again in a backward pass, as activation "
                f"checkpointing does, and there it would see one micro-batch. "
                f"Checkpoint only what lies between two layers of BatchNorm. With "
                f'memory="flat" leave all checkpoints out: it computes anew by itself.'
            )
        return self._alone(*args, **kwargs)

    def _alone(self, x: Tensor) -> Any:
        """Normalise by a window of one micro-batch of each rank."""
        layer: Any = self.module
        ranks = self._sharing.of(layer)
        if ranks.size == 1:
            return self.original(x)
        layer._check_input_dim(x)
        statistics, ((meeting, index, link),) = meet(
            layer, self.name, [x], ranks, OnDevice()
        )
        move_running(layer, statistics)
        return normalised(layer, x, meeting, index, link)


class Interceptions:
    """Intercepts modules in a module, also those that come into it later.

    Args:
        module: which holds them.
        sharing: which ranks share statistics.
        wanted: whether a module is intercepted.
    """

    def __init__(
        self, module: nn.Module, sharing: Sharing, wanted: Callable[[nn.Module], bool]
    ) -> None:
        self._module, self._sharing, self._wanted = module, sharing, wanted
        self._there: dict[nn.Module, Intercepted] = {}

    def __getstate__(self) -> dict[str, Any]:
        """A copy shares statistics with no other rank."""
        return {**vars(self), "_sharing": Sharing()}

    def install(self) -> None:
        """Take the place of forwards that are not intercepted yet."""
        for name, each in self._module.named_modules():
            if each not in self._there and self._wanted(each):
                name = name or type(self._module).__name__
                self._there[each] = Intercepted(each, name, self._sharing)
                self._there[each].install()

    def remove(self) -> None:
        """Give the modules their own forward back."""
        while self._there:
            self._there.popitem()[1].remove()
