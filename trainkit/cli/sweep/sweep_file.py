"""A sweep in W&B's own format, checked before anything is created."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import JsonValue, TypeAdapter, ValidationError

from trainkit.cli.sweep.command import check_command, is_trainkit
from trainkit.cli.sweep.parameters import leaves
from trainkit.cli.sweep.schema import Hyperband, Metric, Parameter, Sweep
from trainkit.errors import TrainkitError, did_you_mean

_MODELS = {"parameters": Parameter, "metric": Metric, "early_terminate": Hyperband}
_EXAMPLES = {
    "method": "method: random",
    "parameters": "parameters: {optimizer.lr: {values: [0.1, 0.01]}}",
    "metric": "metric: {name: val/loss, goal: minimize}",
    "early_terminate": "early_terminate: {type: hyperband, min_iter: 3}",
    "command": 'command: ["${env}", "trainkit", "train", "${args_no_hyphens}"]',
    "run_cap": "run_cap: 20",
}
_RULES = {
    "missing": "must be given",
    "model_type": "must be a mapping",
    "dict_type": "must be a mapping",
    "list_type": "must be a list",
    "too_short": "must not be empty",
    "bool_type": "must be true or false",
    "int_type": "must be a whole number from 1",
    "greater_than_equal": "must be a whole number from 1",
    "string_type": "must be text; put it in quotes",
    "invalid-json-value": "must be text, a number, true, false, null, a list or a "
    "mapping; put it in quotes",
}
"""The rule of each of pydantic's errors; of another, pydantic's own words."""
_IN_A_GRID = ("constant", "categorical", "int_uniform", "q_uniform")


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


def check(config: dict[str, Any], *, where: str) -> None:
    """Refuse a sweep that cannot run, or that W&B would misread."""
    try:
        TypeAdapter(dict[str, JsonValue]).validate_python(config, strict=True)
        for key in config:
            known = Sweep.model_fields
            close = difflib.get_close_matches(key, known, n=1, cutoff=0.8)
            if key not in known and close:
                raise TrainkitError(
                    f"{where}: has a key {key!r}, which W&B does not know. Did you "
                    f"mean {close[0]}?"
                )
        sweep = Sweep.model_validate(config)
    except ValidationError as error:
        raise TrainkitError(_message(error, where)) from error
    _check_metric(sweep, where)
    for name, given in leaves(config["parameters"]):
        if sweep.method == "grid" and Parameter(**given).kind not in _IN_A_GRID:
            raise TrainkitError(
                f"{where} parameters.{name}: a grid needs values, received {given!r}. "
                f"List them as values: [...], or choose method: random or bayes."
            )
    check_command(config, where=where)


def _check_metric(sweep: Sweep, where: str) -> None:
    is_bayes = sweep.method == "bayes"
    if sweep.metric is None and (is_bayes or sweep.early_terminate is not None):
        reader = "method: bayes" if is_bayes else "early_terminate"
        raise TrainkitError(
            f"{where} metric: {reader} needs one, and it is missing. Write "
            f"{_EXAMPLES['metric']}."
        )


def _message(error: ValidationError, where: str) -> str:
    """The first error in a line: the place, the rule, the value, and what to do."""
    detail: Any = error.errors(include_url=False)[0]
    place = [part for part in detail["loc"] if part not in ("list", "dict", "[key]")]
    at = ".".join(part for part in place if isinstance(part, str))
    section = str(place[0]) if place else ""
    received, own = detail["input"], detail.get("ctx", {})
    if detail["type"] == "extra_forbidden":
        received, known = place[-1], _MODELS[section].model_fields
        rule = f"must be one of the keys {', '.join(known)}"
        remedy = did_you_mean(received, known).strip()
    elif "remedy" in own:
        rule, remedy = own["rule"], own["remedy"]
    else:
        said = detail["msg"].replace("Input should be", "must be")
        rule = _RULES.get(detail["type"], said)
        example = _EXAMPLES.get(section)
        remedy = f"Write, for example, {example}." if example else ""
    return f"{where} {at}: {rule}, received {received!r}. {remedy}".rstrip()
