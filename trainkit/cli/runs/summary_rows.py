"""The table of a run that has ended, from its `summary.json`."""

from __future__ import annotations

from typing import Any

from trainkit.core.noise.advice import short
from trainkit.core.plan.options import brief

Row = tuple[str, str]


def rows(facts: dict[str, Any]) -> list[Row]:
    """The lines of the table after training, and of the report."""
    done = f"{facts['status']} after {counted_steps(facts['steps'])}"
    found = [("training", done), *_window_rows(facts["windows"])]
    tested = (facts.get("test") or {}).get("metrics", {})
    for name, value in {**facts["metrics"], **tested}.items():
        if value is not None and not name.startswith(("lr-", "window/")):
            found.append((name, f"{value:.4g}"))
    limits = facts["micro_batching"]
    if limits is not None:
        known = [f"{name}={limit}" for name, limit in limits.items() if limit]
        found.append(("micro-batches", ", ".join(known) or "auto"))
    if facts["learning_rates"]:
        rates = ", ".join(_brief(rate, 3) for rate in facts["learning_rates"])
        found.append(("learning rate", f"{rates} at the end"))
    plain = facts["plain_accumulation"]
    if plain is not None:
        found.append(
            (
                "plain accumulation",
                f"its gradients would have been off by {plain['mean']:.1%} of their "
                f"size in these windows, {plain['largest']:.1%} in the worst",
            )
        )
    found += [(label, text) for label, text in facts.get("advice") or ()]
    if facts.get("throughput") is not None:
        found.append(("throughput", throughput_text(**facts["throughput"])))
    return found


def counted_steps(steps: int) -> str:
    """The number of steps in words.

    >>> counted_steps(1), counted_steps(2000)
    ('1 optimizer step', '2,000 optimizer steps')
    """
    return f"{steps:,} optimizer step{'s' * (steps != 1)}"


def _window_rows(windows: dict[str, Any]) -> list[Row]:
    if not windows:
        return []
    mean = windows["weight"] / windows["windows"]
    return [
        (
            "window/loss",
            f"{_brief(windows['first_loss'])} -> {_brief(windows['last_loss'])}",
        ),
        (
            "window weight",
            f"{mean:,.0f} on average, from {brief(windows['smallest'])} to "
            f"{brief(windows['largest'])}",
        ),
    ]


def _brief(number: float | None, digits: int = 4) -> str:
    return "not finite" if number is None else f"{number:.{digits}g}"


def throughput_text(
    steps_per_second: float,
    samples_per_second: float | None,
    tokens_per_second: float | None,
    padding: float | None,
    waiting: float | None,
    **_: float,
) -> str:
    """The numbers of `throughput` in a run's summary, in words."""
    said = [f"{short(steps_per_second)} steps/s"]
    if samples_per_second is not None:
        said = [f"{short(samples_per_second)} samples/s"]
    if tokens_per_second is not None:
        said.append(f"{short(tokens_per_second)} tokens/s")
    if padding is not None:
        said.append(f"{padding:.0%} padding")
    if waiting is not None:
        said.append(f"{waiting:.0%} of the time waiting for data")
    return ", ".join(said)
