"""What others do again for each Trainer and each composition, done once or left out."""

import contextlib
import copy
import functools
import importlib.metadata
import inspect
import sys
import time
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary


def make_quicker() -> None:
    """Change libraries so that thousands of tests in one process take less time."""
    # Every Trainer looks for callbacks in what is installed: 6 ms.
    importlib.metadata.entry_points = functools.cache(importlib.metadata.entry_points)


def make_trainings_quicker() -> None:
    """Log, look at hooks and set seeds with less around it: a quarter of a tiny
    training's time."""
    if "lightning.pytorch" not in sys.modules:
        return
    from lightning.fabric.utilities import registry
    from lightning.pytorch.trainer.connectors.logger_connector import result
    from lightning.pytorch.utilities import signature_utils as signatures

    # `make_quicker` was called before Lightning was imported.
    assert hasattr(registry.entry_points, "cache_info")  # type: ignore[attr-defined]
    metric: Any = result._ResultMetric
    if metric.to.__name__ == "move":  # a fork of one that is quicker
        return
    metric.to = _moving_less(metric.to)
    _hook_names_at_once(sys.modules["lightning.pytorch"].LightningModule)
    nothing = contextlib.nullcontext()
    sys.modules["lightning.pytorch.profilers"].PassThroughProfiler.profile = (  # type: ignore[attr-defined]
        lambda profiler, action_name: nothing
    )
    once = _once_a_function(inspect.getfullargspec)
    signatures.inspect = SimpleNamespace(getfullargspec=once)  # type: ignore[attr-defined]
    # Each seed is kept for devices that wake up later, with the text of the stack.
    for name in ("torch.cuda", "torch.xpu", "torch.mtia"):
        if name in sys.modules:
            shown = SimpleNamespace(format_stack=list)
            vars(sys.modules[name])["traceback"] = shown


def _hook_names_at_once(kind: Any) -> None:
    """Modules are told before and after each hook which one runs: not by way of what
    looks whether a parameter is set."""
    real = kind.__setattr__

    def set_value(self: Any, name: str, value: Any) -> None:
        if name == "_current_fx_name":
            self.__dict__[name] = value
        else:
            real(self, name, value)

    kind.__setattr__ = set_value


def _moving_less(real: Callable[..., Any]) -> Callable[..., Any]:
    """Leave a logged number's metric where it is, if the number is there as well: to
    move it copies all that it holds."""

    def move(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not kwargs and self.is_tensor and args == (self.value.device,):
            return self
        return real(self, *args, **kwargs)

    return move


def _once_a_function(real: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Each batch asks for the arguments of several hooks."""
    known: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    def of(hook: Any) -> Any:
        function = getattr(hook, "__func__", None)
        if not isinstance(function, FunctionType):
            return real(hook)
        if function not in known:
            known[function] = real(hook)
        return known[function]

    return of


def make_hydra_quicker() -> None:
    """Read YAML in C, parse each text once, copy less, and compose a job once: together
    five sixths of its time.

    Before each job Hydra composes its configuration to read `hydra.mode`. No test sets
    it; one that did would fail, since Hydra compares the mode with what it runs.
    """
    # The tests at hand may not use it, or another one, which may have other parts.
    hydra = sys.modules.get("hydra")
    if hydra is None or not hydra.__version__.startswith("1.3."):
        return
    import yaml
    from hydra._internal.hydra import Hydra
    from hydra.core.config_store import ConfigStore

    if Hydra.get_mode.__name__ == "no_mode":  # a fork of one that is
        return

    def no_mode(self: Any, config_name: Any, overrides: Any) -> None: ...

    Hydra.get_mode = no_mode
    yaml.SafeLoader = yaml.CSafeLoader  # type: ignore[misc]
    _parse_once()
    _make_maps_if_needed()
    # Each composition would copy all that is registered, and then what it takes of it.
    ConfigStore.__deepcopy__ = lambda store, memo: store  # type: ignore[attr-defined]


def _parse_once() -> None:
    """Overrides and interpolations: the parsers are written in Python."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import _utils, base, grammar_parser

    once = functools.cache(grammar_parser.parse)  # a tree, which is only read
    base.parse = _utils.parse = once  # type: ignore[attr-defined]
    parse_rule, parsed = OverridesParser.parse_rule, {}

    def parse_rule_once(self: Any, s: str, rule_name: str) -> Any:
        if (s, rule_name) not in parsed:
            parsed[s, rule_name] = parse_rule(self, s, rule_name)
        return copy.deepcopy(parsed[s, rule_name])  # Hydra completes it

    OverridesParser.parse_rule = parse_rule_once  # type: ignore[method-assign]


def _make_maps_if_needed() -> None:
    """Each list of defaults gets a map of choices, even if none of them refers to it:
    a fifth of a composition."""
    from hydra._internal import defaults_list

    real = defaults_list._create_interpolation_map

    def only_if_needed(overrides: Any, defaults: Any, self_added: bool) -> Any:
        if any(default.is_interpolation() for default in defaults):
            return real(overrides, defaults, self_added)
        return None

    defaults_list._create_interpolation_map = only_if_needed


def make_wandb_quicker() -> None:
    """List once what is installed, which each run notes: 150 ms. And see within 10 ms
    that the client's service has started, not within 200."""
    if "wandb" not in sys.modules:
        return
    with contextlib.suppress(ImportError, AttributeError):  # another client's parts
        from wandb import util
        from wandb.sdk.lib.service import service_port_file

        installed = util.working_set
        if installed.__name__ == "listed":  # a fork of one that is quicker
            return

        @functools.cache
        def listed() -> list[Any]:
            return list(installed())

        util.working_set = listed
        service_port_file._SLEEP = lambda seconds: time.sleep(min(seconds, 0.01))


def begin_without_proof() -> None:
    """Let trainings begin without a proof: many tests train what is not the big batch.

    Those of tests/lit/proof and tests/lit/inside, and commands in processes, begin
    with it.
    """
    from trainkit.lit.proof.start import ProofAtStart

    ProofAtStart.is_on = False
