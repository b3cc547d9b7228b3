"""What to do about a module that does not run in chunks of rows as it should."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from torch import nn

from trainkit.core.batch_norm.layers import listed
from trainkit.core.inside.moment import Moment
from trainkit.core.inside.outputs import Unfit
from trainkit.core.inside.rows import Arguments
from trainkit.core.out_of_memory import is_out_of_memory
from trainkit.errors import TrainkitError

BY_REASON = {
    r"is an? \w*Cache": "Pass use_cache=False to it, or name a module within it{}",
    "does not require grad": "Chunks run without a graph first: within its forward, "
    "wrap what calls autograd.grad in torch.enable_grad(), with an input that "
    "requires_grad_() there",
    r"of shape \[\], has no rows": "Compute that outside of it, and name a module "
    "within it that makes the hidden states{}",
    "": "Name in shared= the arguments that all rows need; or name a module within "
    "it{}, or one around it",
}
"""What to do, by a pattern of the reason; the first that fits. {} is for names."""

SHARE = 0.1
"""A submodule that holds less of the parameters is not worth a name."""


@contextlib.contextmanager
def refusing(
    module: nn.Module, name: str, arguments: Arguments, moment: Moment
) -> Iterator[None]:
    """Within it, what shows that rows do not stand alone is an error for the user.

    Args:
        module: which is cut.
        name: of it.
        arguments: of the call.
        moment: what the module was like before.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error.__cause__, TrainkitError):
            raise error.__cause__ from None
        is_own = isinstance(error, TrainkitError) and not isinstance(error, Unfit)
        if is_own or is_out_of_memory(error):
            raise
        moment.check_state()  # what moves is why rows seem to see each other
        reason = str(error)
        if not isinstance(error, Unfit):
            reason = f"it does not run on fewer rows: {type(error).__name__}: {error}"
        raise _refusal(reason, arguments, module, name) from error


def _refusal(
    reason: str, arguments: Arguments, module: nn.Module, name: str
) -> TrainkitError:
    pairs = zip(arguments.paths, arguments.cut, strict=True)
    cut, whole = [], []
    for path, is_cut in pairs:
        path = re.sub(r"(\.\d+)+$", "", path)  # a list is one argument
        (cut if is_cut else whole).append(path)
    cut, whole = (list(dict.fromkeys(each)) for each in (cut, whole))
    rest = f", and each chunk gets all of {listed(whole, at_most=9)}" if whole else ""
    hints = list(_hints(arguments, module, name, reason))
    return TrainkitError(
        f"{name}: it cannot run in chunks of rows: {reason.rstrip('.')}. Its rows are "
        f"the {arguments.rows} of {listed(cut, at_most=9)}, as long as the first "
        f"tensor{rest}. {'. '.join(hints)}."
    )


def _hints(
    arguments: Arguments, module: nn.Module, name: str, reason: str
) -> Iterator[str]:
    if any(path.endswith("batch_sizes") for path in arguments.paths):
        yield (
            "A PackedSequence cannot be cut: pass the padded tensor and the lengths, "
            "and pack them inside the module"
        )
    second = [
        path or name
        for path, each in module.named_modules()
        if getattr(each, "batch_first", True) is False
    ]
    if second and "depend" in reason and "shape []" not in reason:
        yield (
            f"Rows must be dimension 0 of its arguments. Where they are dimension 1, "
            f"as in {listed(second, at_most=2)}, use batch_first=True, or transpose "
            f"inside the module"
        )
    if any(path.rpartition(".")[2].isdigit() for path in arguments.paths):
        yield "If a list holds samples, stack them into one tensor"
    hint = next(text for at, text in BY_REASON.items() if re.search(at, reason))
    within = [repr(each) for each in paths_within(module, name)]
    yield hint.format(within and f", such as {' and '.join(within)}" or "")


def paths_within(module: nn.Module, name: str) -> list[str]:
    """The paths of a module's large submodules, at most three; if some have submodules
    of their own, of these.

    Args:
        module: whose submodules they are.
        name: its own path.
    """
    before = "" if name == "self" or "(" in name else f"{name}."
    children = [
        (sum(p.numel() for p in child.parameters()), f"{before}{path}", child)
        for path, child in module.named_children()
        if type(child).forward is not nn.Module.forward
    ]
    least = SHARE * sum(p.numel() for p in module.parameters())
    large = [(path, child) for size, path, child in children if size > least]
    deep = [(path, child) for path, child in large if list(child.children())]
    return [path for path, _ in deep or large][:3]
