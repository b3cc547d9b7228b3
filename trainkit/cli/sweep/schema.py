"""W&B's format of a sweep, as models of pydantic.

What a model refuses has a rule, and maybe a remedy. `sweep_file.py` makes the message.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from trainkit.cli.sweep.parameters import is_number, number_for_yaml
from trainkit.errors import did_you_mean

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_RANGES = ("uniform", "log_uniform", "log_uniform_values")
DISTRIBUTIONS = (
    *("constant", "categorical", "categorical_w_probabilities", "int_uniform"),
    *(f"{q}{name}" for name in _RANGES for q in ("", "q_")),
    *("inv_log_uniform", "inv_log_uniform_values"),
    *(f"{q}{name}" for name in ("normal", "log_normal", "beta") for q in ("", "q_")),
)
"""The distributions of W&B's own schema."""

_LISTED = {
    "constant": ("value",),
    "categorical": ("values",),
    "categorical_w_probabilities": ("values", "probabilities"),
}
_DRAWN = {"uniform": ("min", "max"), "normal": ("mu", "sigma"), "beta": ("a", "b")}


def refusal(rule: str, remedy: str = "") -> PydanticCustomError:
    """An error for a validator to raise."""
    return PydanticCustomError("rule", "{rule}", {"rule": rule, "remedy": remedy})


def _plain(value: Any) -> Any:
    """Refuse a number that YAML has read as text."""
    if isinstance(value, str) and (fixed := number_for_yaml(value)):
        raise refusal(
            f"{value} looks like a number, and YAML reads it as text",
            f"Write {fixed}.",
        )
    return value


def _number(value: Any) -> Any:
    if not is_number(_plain(value)):
        raise refusal("must be a number")
    return value


def _name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise refusal(
            "W&B takes letters, digits, _, - and points in a name",
            f"Write {name.lstrip('+~')!r} if it is a key of the configuration. Keys "
            f"that Hydra adds or deletes belong in `command`, before "
            f"${{args_no_hyphens}}.",
        )
    return name


def _distribution(name: Any) -> Any:
    if name not in DISTRIBUTIONS:
        raise refusal(
            f"must be one of {', '.join(DISTRIBUTIONS)}",
            did_you_mean(name, DISTRIBUTIONS).strip(),
        )
    return name


Value = Annotated[Any, AfterValidator(_plain)]
Number = Annotated[Any, AfterValidator(_number)]
Count = Annotated[int, Field(ge=1)]
Name = Annotated[str, AfterValidator(_name)]
Goal = Literal["minimize", "maximize"]


class _Strict(BaseModel):
    """Takes no other keys, and no text for a number."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Parameter(_Strict):
    """One parameter, with its values, its distribution, or parameters inside."""

    value: Value = None
    values: Annotated[list[Value], Field(min_length=1)] = []
    probabilities: list[Number] = []
    distribution: Annotated[Any, AfterValidator(_distribution)] = None
    min: Number = 0
    max: Number = 0
    mu: Number = 0
    sigma: Number = 1
    a: Number = 1
    b: Number = 1
    q: Number = 1
    parameters: Annotated[dict[Name, Parameter], Field(min_length=1)] = {}

    @property
    def kind(self) -> str:
        """Its distribution: the one that it names, or that follows from its keys."""
        given = self.model_fields_set
        if "distribution" in given:
            return self.distribution
        for name, keys in reversed(_LISTED.items()):
            if given >= {*keys}:
                return name
        bounds = (self.min, self.max)
        return "int_uniform" if all(isinstance(b, int) for b in bounds) else "uniform"

    @model_validator(mode="after")
    def _check(self) -> Parameter:
        given = self.model_fields_set
        if not given & {"value", "values", "min", "parameters", "distribution"}:
            raise refusal(
                "must have values", "Give it value, values, min and max, or parameters."
            )
        if "parameters" not in given:
            self._check_keys()
            self._check_range()
        if "probabilities" in given:
            self._check_probabilities()
        return self

    def _check_keys(self) -> None:
        needed, taken = _keys_of(self.kind)
        given = [key for key in self.model_fields_set if key != "distribution"]
        if needed <= {*given} <= taken:
            return
        raise refusal(f"distribution {self.kind} takes {', '.join(_in_order(taken))}")

    def _check_range(self) -> None:
        if "min" not in self.model_fields_set:
            return
        if not self.min < self.max:
            raise refusal("min must be below max")
        bounds = (self.min, self.max)
        if self.kind == "int_uniform" and not all(isinstance(b, int) for b in bounds):
            raise refusal(
                "int_uniform takes whole numbers",
                "Write distribution: uniform for numbers between them.",
            )
        # https://docs.wandb.ai/guides/sweeps: log_uniform's bounds are exponents of e.
        is_exponent = self.kind in ("log_uniform", "q_log_uniform")
        if is_exponent and 0 < self.min and self.max <= 1:
            low, high = math.exp(self.min), math.exp(self.max)
            raise refusal(
                f"{self.kind} takes exponents of e, so these mean {low:.4g} to "
                f"{high:.4g}",
                f"Write distribution: {self.kind}_values for bounds of the value.",
            )
        if self.kind.endswith("log_uniform_values") and self.min <= 0:
            raise refusal(f"{self.kind} needs min above 0")

    def _check_probabilities(self) -> None:
        each = self.probabilities
        is_one_each = len(each) == len(self.values)
        if not is_one_each or not all(0 <= share <= 1 for share in each):
            raise refusal(
                f"probabilities must be {len(self.values)} numbers from 0 to 1, one "
                f"for each of values"
            )
        if not math.isclose(sum(each), 1, rel_tol=1e-5):
            raise refusal(f"probabilities must sum to 1, and sum to {sum(each):g}")


def _keys_of(distribution: str) -> tuple[set[str], set[str]]:
    """The keys that a distribution needs, and all that it takes."""
    if distribution in _LISTED:
        return {*_LISTED[distribution]}, {*_LISTED[distribution]}
    keys = next(keys for name, keys in _DRAWN.items() if name in distribution)
    quantum = {"q"} if distribution.startswith("q_") else set()
    return {*keys} & {"min", "max"}, {*keys} | quantum


def _in_order(keys: set[str]) -> list[str]:
    return [key for key in Parameter.model_fields if key in keys]


class Metric(_Strict):
    """What compares trials."""

    name: str
    goal: Goal = "minimize"
    target: Number = None
    impute: Any = None
    impute_while_running: Any = None


class Hyperband(_Strict):
    """When a poor trial is stopped, counted in values of the metric."""

    type: Literal["hyperband"]
    min_iter: Count | None = None
    max_iter: Count | None = None
    s: Count | None = None
    eta: Number = 3
    strict: bool = False

    @model_validator(mode="after")
    def _check(self) -> Hyperband:
        if self.min_iter is None and (self.max_iter is None or self.s is None):
            raise refusal("needs min_iter, or max_iter and s")
        if not self.eta > 1:
            raise refusal("eta must be a number above 1")
        return self


class Sweep(BaseModel):
    """A sweep. W&B takes keys that it does not know, so only misspelt ones are refused.

    The command is checked where it is understood (`command.py`).
    """

    model_config = ConfigDict(extra="allow", strict=True)

    method: Literal["grid", "random", "bayes"]
    parameters: Annotated[dict[Name, Parameter], Field(min_length=1)]
    metric: Metric | None = None
    early_terminate: Hyperband | None = None
    program: str | None = None
    command: Annotated[list[Any], Field(min_length=1)] | None = None
    run_cap: Count | None = None
    name: Any = None
    description: Any = None
    project: Any = None
    entity: Any = None
    controller: Any = None
