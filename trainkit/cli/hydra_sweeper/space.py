"""What `trainkit train -m` sweeps, as a sweep in W&B's format."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, QuotedString

from trainkit.cli.sweep.command import hydra_text
from trainkit.cli.sweep.config_keys import check_keys
from trainkit.cli.sweep.sweep_file import METHODS, SweepFile, check
from trainkit.cli.words import CONFIG_DIR, CONFIG_NAME, CONFIG_PATH, conf_in, key_of
from trainkit.config.redact import redact_words
from trainkit.core.plan.options import check_whole_number
from trainkit.errors import TrainkitError, did_you_mean

WHERE = "hydra/sweeper=wandb"
"""The name of the sweep in messages, where a file has its path."""

_TRIALS = 20
_EXAMPLE = "'optimizer.lr=tag(log,interval(1e-4,1e-2))' or data.batch_size=8,16"


@dataclass(frozen=True, kw_only=True)
class Space:
    """What varies between trials, and what all of them share.

    Attributes:
        parameters: what varies, in W&B's format.
        fixed: the overrides of every trial.
        prefixes: `+` or `++` of the names that have one, which W&B's names cannot have.
        whole: the names whose values are whole numbers, but which W&B may draw as 8.0.
    """

    parameters: dict[str, dict[str, Any]]
    fixed: list[str]
    prefixes: dict[str, str]
    whole: frozenset[str]

    def words_of(self, arguments: Mapping[str, Any]) -> list[str]:
        """The overrides of a trial with these arguments."""
        values = {
            name: round(value) if name in self.whole else value
            for name, value in arguments.items()
        }
        return [
            *self.fixed,
            *(f"{self._key(name)}={hydra_text(each)}" for name, each in values.items()),
        ]

    def shared_words(self) -> list[str]:
        """Overrides after which every trial's `name=value` is accepted without `+`."""
        added = {name: self.parameters[name] for name in self.prefixes}
        examples = {n: p.get("values", [p.get("min")])[0] for n, p in added.items()}
        return [
            *self.fixed,
            *(f"{self._key(n)}={hydra_text(each)}" for n, each in examples.items()),
        ]

    def _key(self, name: str) -> str:
        return self.prefixes.get(name, "") + name


def read_space(
    arguments: Sequence[str], params: Mapping[str, Any] | None, loader: ConfigLoader
) -> Space:
    """Separate the swept overrides from the others.

    Args:
        arguments: the overrides of the command line.
        params: more of them, by key; the command line goes before them.
        loader: Hydra's, for `glob`.

    Raises:
        TrainkitError: nothing is swept, or W&B cannot draw it.
    """
    words = [f"{key}={value}" for key, value in (params or {}).items()]
    parser = OverridesParser.create(config_loader=loader)
    found = parser.parse_overrides([*words, *arguments])
    by_key = {key_of(override.get_key_element()): override for override in found}
    swept = {k: o for k, o in by_key.items() if o.is_sweep_override()}
    if not swept:
        raise TrainkitError(
            f"{WHERE}: nothing is swept. Write, for example, {_EXAMPLE}."
        )
    parameters = {key: _parameter(key, override) for key, override in swept.items()}
    return Space(
        parameters=parameters,
        fixed=[str(o.input_line) for o in found if not o.is_sweep_override()],
        prefixes={
            key: "+" if each.is_add() else "++"
            for key, each in swept.items()
            if each.is_add() or each.is_force_add()
        },
        whole=frozenset(k for k, p in parameters.items() if p.get("q") == 1),
    )


def _parameter(key: str, override: Override) -> dict[str, Any]:
    if override.package is not None or "/" in key:
        raise TrainkitError(
            f"{WHERE} {override.get_key_element()}: W&B takes letters, digits, _, - "
            f"and points in the name of a parameter. Such a group cannot be swept; "
            f"sweep one that chooses it, such as experiment=a,b."
        )
    value: Any = override.value()
    tags = getattr(value, "tags", set())
    is_interval = isinstance(value, IntervalSweep)
    if tags - {"log"} or (tags and not is_interval):
        raise TrainkitError(
            f"{WHERE} {key}: the only tag is log, of an interval, received "
            f"{override.input_line}. Write tag(log,interval(1e-4,1e-2)), or no tag."
        )
    if not is_interval:
        return {"values": [_plain(each) for each in override.sweep_iterator()]}
    bounds = {"min": value.start, "max": value.end}
    is_whole = isinstance(value.start, int)  # only int(interval(...)) is
    if "log" not in tags:
        return {"distribution": "int_uniform" if is_whole else "uniform", **bounds}
    if is_whole:
        return {"distribution": "q_log_uniform_values", "q": 1, **bounds}
    return {"distribution": "log_uniform_values", **bounds}


def _plain(value: Any) -> Any:
    if isinstance(value, QuotedString):
        return value.text
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return value


def as_sweep(space: Space, options: Mapping[str, Any]) -> SweepFile:
    """The sweep that W&B gets, checked as a file is.

    Its `command` is this command without `-m`, so that an agent on another machine can
    run trials too.

    Raises:
        TrainkitError: it cannot run.
    """
    method = options["method"]
    config: dict[str, Any] = {
        "method": method,
        "parameters": space.parameters,
        "command": [
            *("${env}", "trainkit", "train"),
            *(*_of_all_jobs(), *space.shared_words()),
            "${args_no_hyphens}",
        ],
    }
    if method not in METHODS:
        raise TrainkitError(
            f"hydra.sweeper.method: must be one of {', '.join(METHODS)}, received "
            f"{method!r}.{did_you_mean(method, METHODS)}"
        )
    intervals = [name for name, each in space.parameters.items() if "min" in each]
    if method == "grid" and intervals:
        raise TrainkitError(
            f"{WHERE} {intervals[0]}: a grid needs values, received an interval. List "
            f"them, {intervals[0]}=0.1,0.2, or write hydra.sweeper.method=random."
        )
    count = options["n_trials"]
    if count is not None:
        check_whole_number("hydra.sweeper.n_trials", count)
    if count is not None or method != "grid":
        config["run_cap"] = count or _TRIALS
    if options["metric"]:
        config["metric"] = {"name": options["metric"], "goal": options["goal"]}
    for key in ("name", "project", "entity", "early_terminate"):
        if options[key] is not None:
            config[key] = options[key]
    check(config, where=WHERE)
    sweep = SweepFile(path=Path(WHERE), config=config)
    check_keys(sweep)
    config["command"] = redact_words(config["command"])
    return sweep


def _of_all_jobs() -> list[str]:
    """The options of this command line that say where configurations are; without
    `conf/` of the current folder, which another machine finds in its own."""
    places = (CONFIG_DIR, CONFIG_NAME, CONFIG_PATH)
    here = f"{CONFIG_DIR}={conf_in(Path())}"
    words = [word for word in sys.argv[1:] if key_of(word) in places]
    return [word for word in words if word != here]
