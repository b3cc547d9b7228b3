"""A sweep in W&B's own format, checked before anything is created."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainkit.cli.sweep.command import check_command, is_trainkit
from trainkit.cli.sweep.early_terminate import check_early_terminate
from trainkit.cli.sweep.parameters import check_parameters, leaves
from trainkit.core.plan.options import check_whole_number
from trainkit.errors import TrainkitError

METHODS = ("grid", "random", "bayes")
_KNOWN = (
    "command controller description early_terminate entity method metric name "
    "parameters program project run_cap"
).split()
_GOALS = ("minimize", "maximize")
_OF_METRIC = ("name", "goal", "target", "impute", "impute_while_running")


@dataclass(frozen=True, kw_only=True)
class SweepFile:
    """A sweep file that has been checked.

    Attributes:
        path: where it is.
        config: its content, as W&B receives it.
    """

    path: Path
    config: dict[str, Any]

    @classmethod
    def read(cls, path: str | Path) -> SweepFile:
        """Read and check a file.

        Raises:
            TrainkitError: it cannot be read, or describes a sweep that cannot run.
        """
        path = Path(path)
        config = _load(path)
        check(config, where=str(path))
        return cls(path=path, config=config)

    @property
    def method(self) -> str:
        return self.config["method"]

    @property
    def metric(self) -> str | None:
        """The metric that compares trials; grid and random search may have none."""
        return (self.config.get("metric") or {}).get("name")

    @property
    def maximizes(self) -> bool:
        return (self.config.get("metric") or {}).get("goal") == "maximize"

    @property
    def runs_trainkit(self) -> bool:
        return is_trainkit(self.config)

    @property
    def varied(self) -> dict[str, Mapping[str, Any]]:
        """The parameters that differ between trials, by dotted name."""
        return {
            name: parameter
            for name, parameter in leaves(self.config["parameters"])
            if "value" not in parameter and len(parameter.get("values", "ab")) > 1
        }


def _load(path: Path) -> dict[str, Any]:
    import yaml

    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TrainkitError(
            f"sweep file: {path} cannot be read: {error.strerror}."
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise TrainkitError(f"sweep file: {path} is not YAML: {error}") from error
    if not isinstance(config, dict):
        raise TrainkitError(
            f"sweep file: {path} must be a mapping with method and parameters, "
            f"received {config!r}."
        )
    return config


def check(config: Mapping[str, Any], *, where: str) -> None:
    """Refuse a sweep that cannot run, or that W&B would misread."""
    for key in config:
        close = difflib.get_close_matches(str(key), _KNOWN, n=1, cutoff=0.8)
        if key not in _KNOWN and close:
            raise TrainkitError(
                f"{where}: has a key {key!r}, which W&B does not know. Did you mean "
                f"{close[0]}?"
            )
    method = config.get("method")
    if method not in METHODS:
        raise TrainkitError(
            f"{where} method: must be one of {', '.join(METHODS)}, received {method!r}."
        )
    check_parameters(config.get("parameters"), method=str(method), where=where)
    _check_metric(config, where)
    check_early_terminate(config.get("early_terminate"), where=where)
    check_whole_number(f"{where} run_cap", config.get("run_cap", 1))
    check_command(config, where=where)
    _check_plain(config, where)


def _check_plain(node: Any, where: str) -> None:
    """Refuse dates, and keys that are not text, which W&B and JSON do not have."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            if not isinstance(key, str):
                raise TrainkitError(
                    f"{where}: keys must be text, received {key!r}. Put it in quotes."
                )
            _check_plain(value, f"{where} {key}")
    elif isinstance(node, list):
        for value in node:
            _check_plain(value, where)
    elif node is not None and not isinstance(node, str | int | float):
        raise TrainkitError(
            f"{where}: must be a text, a number, true, false, null or a list of such, "
            f"received {node!r}. Put it in quotes."
        )


def _check_metric(config: Mapping[str, Any], where: str) -> None:
    metric = config.get("metric")
    if metric is None:
        is_bayes = config["method"] == "bayes"
        if is_bayes or config.get("early_terminate") is not None:
            reader = "method: bayes" if is_bayes else "early_terminate"
            raise TrainkitError(
                f"{where} metric: {reader} needs one, and it is missing. Write "
                f"metric: {{name: val/loss, goal: minimize}}."
            )
        return
    if not isinstance(metric, Mapping) or not isinstance(metric.get("name"), str):
        raise TrainkitError(
            f"{where} metric: must have a name, received {metric!r}. Write metric: "
            f"{{name: val/loss, goal: minimize}}."
        )
    for key, value in metric.items():
        if key not in _OF_METRIC:
            raise TrainkitError(
                f"{where} metric.{key}: must be one of the keys "
                f"{', '.join(_OF_METRIC)}, received {key}: {value!r}."
            )
    goal = metric.get("goal", "minimize")
    if goal not in _GOALS:
        raise TrainkitError(
            f"{where} metric.goal: must be minimize or maximize, received {goal!r}."
        )
