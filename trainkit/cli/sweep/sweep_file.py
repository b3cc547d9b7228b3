"""A sweep in W&B's own format, as models of pydantic that refuse what cannot run."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    model_validator,
)

from trainkit.errors import TrainkitError, did_you_mean

_DRAWN = {
    **dict.fromkeys(("uniform", "log_uniform", "log_uniform_values"), {"min", "max"}),
    **dict.fromkeys(("normal", "log_normal"), {"mu", "sigma"}),
    "beta": {"a", "b"},
}
_KEYS = {
    "constant": {"value"},
    "categorical": {"values"},
    "categorical_w_probabilities": {"values", "probabilities"},
    "int_uniform": {"min", "max"},
    **_DRAWN,
    **{f"q_{name}": {*keys, "q"} for name, keys in _DRAWN.items()},
    **dict.fromkeys(("inv_log_uniform", "inv_log_uniform_values"), {"min", "max"}),
}
"""The distributions of W&B's own schema, and the keys that each takes."""

_HAVE_DEFAULTS = {"mu", "sigma", "a", "b", "q"}
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)


def is_number(value: Any) -> bool:
    """Whether a value is a number, and not true or false."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _refuse_if(is_wrong: bool, rule: str) -> None:
    """Refuse a value or a section; `_message` adds the place and the value."""
    if is_wrong:
        raise ValueError(rule)


def _no_number_in_text(value: Any) -> Any:
    """Refuse `1e-4`: YAML 1.1, which W&B reads, wants a point, as in `1.0e-4`."""
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        fixed = yaml.safe_dump(float(value)).split()[0].removesuffix(".0")
        raise ValueError(f"must be written {fixed}, since YAML reads a text here")
    return value


def _number(value: Any) -> Any:
    _refuse_if(not is_number(_no_number_in_text(value)), "must be a number")
    return value


Value = Annotated[JsonValue, AfterValidator(_no_number_in_text)]
Number = Annotated[Any, AfterValidator(_number)]
Count = Annotated[int, Field(ge=1)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]*$")]


class _Section(BaseModel):
    """Takes no other keys, and no text for a number."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Parameter(_Section):
    """One parameter, with its values or its distribution."""

    value: Value = None
    values: Annotated[list[Value], Field(min_length=1)] = []
    probabilities: list[Number] = []
    distribution: Any = None
    min: Number = 0
    max: Number = 0
    mu: Number = 0
    sigma: Number = 1
    a: Number = 1
    b: Number = 1
    q: Number = 1

    @property
    def kind(self) -> str:
        """Its distribution: the one that it names, or that follows from its keys."""
        if "distribution" in self.model_fields_set:
            return self.distribution
        for name in ("categorical_w_probabilities", "categorical", "constant"):
            if self.model_fields_set >= _KEYS[name]:
                return name
        are_whole = isinstance(self.min, int) and isinstance(self.max, int)
        return "int_uniform" if are_whole else "uniform"

    @property
    def listed(self) -> list[Any]:
        """Its values if it has a list or a constant; the lower end of a range."""
        if self.values:
            return self.values
        return [self.min if "min" in _KEYS[self.kind] else self.value]

    @model_validator(mode="after")
    def _check(self) -> Parameter:
        kind, shares = self.kind, self.probabilities
        known = f"{', '.join(_KEYS)}.{did_you_mean(kind, _KEYS)}"
        _refuse_if(kind not in [*_KEYS], f"distribution must be one of {known}")
        keys, given = _KEYS[kind], self.model_fields_set - {"distribution"}
        takes = f"distribution {kind} takes {' and '.join(sorted(keys))}"
        _refuse_if(not keys - _HAVE_DEFAULTS <= given <= keys, takes)
        _refuse_if("min" in keys and not self.min < self.max, "min must be below max")
        _refuse_if(
            kind == "int_uniform" and isinstance(self.min + self.max, float),
            "int_uniform takes whole numbers",
        )
        # https://docs.wandb.ai/guides/sweeps: log_uniform's bounds are exponents of e.
        _refuse_if(
            kind.endswith("log_uniform") and 0 < self.min < self.max <= 1,
            f"{kind} takes exponents of e, and {kind}_values bounds of the value",
        )
        _refuse_if(
            kind.endswith("uniform_values") and self.min <= 0,
            f"{kind} needs min above 0",
        )
        are_shares = len(shares) == len(self.values) and min(shares, default=0) >= 0
        _refuse_if(
            "probabilities" in keys
            and not (are_shares and math.isclose(sum(shares), 1, rel_tol=1e-5)),
            "probabilities must be one from 0 to 1 for each of values, and sum to 1",
        )
        return self


class Metric(_Section):
    """What compares trials."""

    name: str
    goal: Literal["minimize", "maximize"] = "minimize"
    target: Number = None
    impute: JsonValue = None
    impute_while_running: JsonValue = None


class Hyperband(_Section):
    """When a poor trial is stopped, counted in values of the metric."""

    type: Literal["hyperband"]
    min_iter: Count | None = None
    max_iter: Count | None = None
    s: Count | None = None
    eta: Number = 3
    strict: bool = False

    @model_validator(mode="after")
    def _check(self) -> Hyperband:
        has_bands = self.min_iter or (self.max_iter and self.s)
        _refuse_if(not has_bands, "needs min_iter, or max_iter and s")
        _refuse_if(not self.eta > 1, "eta must be a number above 1")
        return self


class SweepFile(_Section):
    """A sweep that has been checked."""

    method: Literal["grid", "random", "bayes"]
    parameters: Annotated[dict[Name, Parameter], Field(min_length=1)]
    metric: Metric | None = None
    early_terminate: Hyperband | None = None
    program: str | None = None
    command: Annotated[list[JsonValue], Field(min_length=1)] | None = None
    run_cap: Count | None = None
    name: JsonValue = None
    description: JsonValue = None
    project: JsonValue = None
    entity: JsonValue = None
    controller: JsonValue = None
    path: Path = Field(Path("sweep.yaml"), exclude=True)

    @classmethod
    def read(cls, path: str | Path) -> SweepFile:
        """Read and check a file.

        Raises:
            TrainkitError: it cannot be read, or describes a sweep that cannot run.
        """
        try:
            content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
            sweep = cls.model_validate(content)
        except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
            said = f"sweep file: {path} cannot be read as YAML: {error}"
            raise TrainkitError(said) from error
        except ValidationError as error:
            raise TrainkitError(f"{path} {_message(error)}") from error
        sweep.path = Path(path)
        return sweep

    @property
    def config(self) -> dict[str, Any]:
        """The content of the file, as W&B receives it."""
        return self.model_dump(exclude_unset=True)

    @property
    def metric_name(self) -> str | None:
        """The metric that compares trials; grid and random search may have none."""
        return self.metric.name if self.metric else None

    @property
    def maximizes(self) -> bool:
        return self.metric is not None and self.metric.goal == "maximize"

    @property
    def words(self) -> list[str]:
        """The words of `command`, or of W&B's default, with the program's name."""
        words = self.command or ["${env}", "${interpreter}", "${program}", "${args}"]
        return [str(self.program if w == "${program}" else w) for w in words]

    @property
    def runs_trainkit(self) -> bool:
        """Whether a trial is `trainkit train`."""
        pairs = zip(self.words, self.words[1:], strict=False)
        return any(Path(a).name == "trainkit" and b == "train" for a, b in pairs)

    @property
    def varied(self) -> list[str]:
        """The names of the parameters that differ between trials."""
        every = self.parameters.items()
        return [n for n, p in every if p.kind != "constant" and len(p.values) != 1]

    @model_validator(mode="after")
    def _check(self) -> SweepFile:
        needs_metric = self.method == "bayes" or self.early_terminate is not None
        _refuse_if(
            needs_metric and self.metric is None,
            "metric: method: bayes and early_terminate need one, and it is missing: "
            "write metric: {name: val/loss, goal: minimize}",
        )
        for name, each in self.parameters.items():
            _refuse_if(
                self.method == "grid" and each.kind not in ("constant", "categorical"),
                f"parameters.{name}: a grid needs values: [...], and this is "
                f"{each.kind}, for method: random or bayes",
            )
        _refuse_if(
            "${program}" in (self.command or ["${program}"]) and not self.program,
            "program: must name the program of a trial, and is missing",
        )
        is_ours = self.runs_trainkit or Path(str(self.program)).name == "trainkit"
        passes_on = {"${args_no_hyphens}", "${args_override_hydra}"} & {*self.words}
        # https://github.com/wandb/wandb/issues/4686
        _refuse_if(
            is_ours and not passes_on,
            f"command: `trainkit train` takes key=value without hyphens, so it needs "
            f"${{args_no_hyphens}}, received {' '.join(self.words)!r}",
        )
        return self


def _message(error: ValidationError) -> str:
    """The first error in a line: the place, the rule, and the value."""
    detail: Any = error.errors(include_url=False)[0]
    value, parts = detail["input"], [p for p in detail["loc"] if isinstance(p, str)]
    at = ".".join(each for each in parts if each not in ("list", "dict", "[key]"))
    rule = re.sub("^Value error, | or instance of .*", "", detail["msg"])
    rule = rule.replace("Input should be", "must be")
    more = ""
    if detail["type"] == "extra_forbidden":
        rule = "trainkit takes no such key"
        models = (Parameter, Metric, Hyperband, SweepFile)
        more = did_you_mean(
            parts[-1], [k for each in models for k in each.model_fields]
        )
        if parts[-1] == "parameters":
            more = " Write a nested parameter by its dotted name: optimizer.lr"
    # The rule about the whole file says what it is about.
    received = "" if not at and isinstance(value, dict) else f", received {value!r}."
    return f"{at}{': ' * bool(at)}{rule}{received}{more}"
