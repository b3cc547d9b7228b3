"""A trial: what it logged, its place in the table, and the picture of all."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Collection
from typing import Any

import pytest
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from trainkit.cli.sweep.sweep_file import SweepFile
from trainkit.cli.sweep.trial import (
    State,
    Trial,
    as_json,
    best_of,
    lacking,
    picture_of,
    ranked,
    table,
)

TRIALS = [
    Trial(name="t0", arguments={"lr": 0.1}, state="finished", metric=[3.0, 2.0]),
    Trial(name="t1", arguments={"lr": 0.01}, state="stopped", metric=[1.0]),
    Trial(name="t2", arguments={"lr": 0.5}, state="crashed", note="exit 1: [out]"),
    Trial(name="t3", arguments={"lr": 1.0}, state="finished", metric=[math.nan]),
    Trial(name="t4", arguments={"lr": 1e-5}, state="finished", metric=[1.5]),
]


def sweep(**config: Any) -> SweepFile:
    parameters = {"lr": {"min": 0.0, "max": 1.0}, "fixed": {"value": 1}}
    common = {"method": "random", "program": "t.py", "metric": {"name": "val/loss"}}
    return SweepFile.model_validate({**common, "parameters": parameters, **config})


@pytest.mark.parametrize(("goal", "best"), [("minimize", "t4"), ("maximize", "t0")])
def test_the_best_has_ended_well_and_what_has_no_number_comes_last(
    goal: str, best: str
) -> None:
    metric = {"name": "val/loss", "goal": goal}
    found = best_of(sweep(metric=metric), TRIALS)
    assert found is not None
    assert found.name == best
    order = [trial.name for trial in ranked(sweep(metric=metric), TRIALS)]
    assert set(order[3:]) == {"t2", "t3"}
    for none in ([], TRIALS[2:4]):
        assert best_of(sweep(metric=metric), none) is None


def test_lines_show_the_swept_values_and_mark_the_best() -> None:
    assert table(sweep(), TRIALS) == [
        "   trial  state     val/loss  lr     note",
        "   t1     stopped   1         0.01",
        "*  t4     finished  1.5       1e-05",
        "   t0     finished  2         0.1",
        "   t2     crashed             0.5    exit 1: [out]",
        "   t3     finished  nan       1",
    ]
    assert table(sweep(), []) == ["  trial  state  val/loss  lr  note"]


def test_json_is_strict_and_complete() -> None:
    read = json.loads(
        as_json(sweep(), TRIALS, id="s1"),
        parse_constant=lambda name: pytest.fail(f"{name} is no JSON"),
    )

    assert (read["id"], read["best"], read["metric"]) == ("s1", "t4", "val/loss")
    assert len(read["trials"]) == len(TRIALS)
    assert {t["name"]: t["value"] for t in read["trials"]}["t3"] is None


def trial(state: State, *metric: float) -> Trial:
    return Trial(name="t", arguments={}, state=state, metric=list(metric))


@pytest.mark.parametrize(
    ("trials", "lacks"),
    [
        ([trial("finished")], True),
        ([trial("crashed"), trial("finished")], True),
        ([trial("crashed"), trial("stopped"), trial("running")], False),
        ([trial("finished", 1.0), trial("finished")], False),
        ([trial("finished"), trial("running", 1.0)], False),
        ([], False),
    ],
)
def test_only_a_finished_trial_tells_and_only_where_none_has_a_value(
    trials: list[Trial], lacks: bool
) -> None:
    assert bool(lacking(sweep(), trials)) == lacks
    assert not lacking(sweep(metric=None), trials)


def test_what_lacks_the_metric_says_what_it_logged_or_needs() -> None:
    ended = trial("finished")
    ours = ["trainkit", "train", "${args_no_hyphens}"]
    assert "logger=wandb" in lacking(sweep(command=ours), [ended])
    assert "logger=wandb" not in lacking(sweep(), [ended])

    ended.logged = ["lr", *(f"grad/{n}" for n in range(20)), "val/loss"]
    text = lacking(sweep(metric={"name": "val/los"}), [ended])
    assert "t finished and logged no val/los" in text
    assert "It logged val/loss, " in text  # the closest first
    assert text.count("grad/") + text.count("lr,") == 11


PARAMETERS: dict[str, Any] = {
    "lr": {"distribution": "log_uniform_values", "min": 0.001, "max": 1.0},
    "batch": {"values": [4, 8, 16]},
    "decay": {"values": [0.0, 0.1]},
    "kind": {"values": ["sqrt", "none", None]},
    "fixed": {"value": 3},
}


def drawn_sweep(
    goal: str = "minimize", *, of: Collection[str] = PARAMETERS
) -> SweepFile:
    config = {
        "program": "t.py",
        "method": "random",
        "metric": {"name": "val/loss", "goal": goal},
        "parameters": {name: PARAMETERS[name] for name in of},
    }
    return SweepFile.model_validate(config)


def drawn(n: int, **about: Any) -> Trial:
    arguments = {
        "lr": 0.001 * (n + 1),
        "batch": [4, 8, 16][n % 3],
        "decay": 0.1 * (n % 2),
        "kind": ["sqrt", "none", None][n % 3],
        "fixed": 3,
    }
    given: dict[str, Any] = {"state": "finished", "metric": [1.0 / (n + 1)], **about}
    return Trial(name=f"t{n}", **{"arguments": arguments, **given})


CRASHED = drawn(6, state="crashed", metric=[])


@pytest.mark.parametrize(("goal", "best"), [("minimize", 5), ("maximize", 0)])
def test_each_swept_parameter_has_a_panel_and_its_own_scale(
    goal: str, best: int
) -> None:
    trials = [*(drawn(n) for n in range(6)), CRASHED, drawn(7, state="stopped")]
    figure = picture_of(drawn_sweep(goal), trials)
    FigureCanvasAgg(figure).draw()
    panels: dict[str, Any] = {panel.get_xlabel(): panel for panel in figure.axes}
    assert list(panels) == ["trial", "lr", "batch", "decay", "kind"]
    scales = {name: panel.get_xscale() for name, panel in panels.items()}
    assert [name for name, scale in scales.items() if scale == "log"] == ["lr"]
    assert [t.get_text() for t in panels["batch"].get_xticklabels()] == ["4", "8", "16"]
    assert list(panels["batch"].get_xticks()) == [0, 1, 2]  # at equal distances
    points = panels["trial"].collections
    places = [tuple(each.get_offsets()[0]) for each in points]
    (ring,) = [n for n, each in enumerate(points) if not len(each.get_facecolors())]
    assert places.pop(ring) == (best, 1.0 / (best + 1))  # one that was stopped is none
    assert places == [(n, 1.0 / (n + 1)) for n in (*range(6), 7)]  # as in their names


def overlap(axis: Axis, figure: Figure) -> bool:
    """Whether two labels of an axis run into each other."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    texts = axis.get_ticklabels(which="both")
    shown = [text for text in texts if text.get_text() and text.get_visible()]
    assert len(shown) >= 2
    boxes = [text.get_window_extent(renderer) for text in shown]
    boxes.sort(key=lambda box: (box.x0, box.y0))
    return any(a.overlaps(b) for a, b in zip(boxes, boxes[1:], strict=False))


@pytest.mark.parametrize("span", [1.3, 9, 90, 400, 1e20], ids=lambda span: f"x{span:g}")
def test_labels_of_a_logarithmic_axis_do_not_run_into_each_other(span: float) -> None:
    places = [0.013 * span ** (n / 3) for n in range(4)]
    trials = [drawn(n, arguments={"lr": x}, metric=[x]) for n, x in enumerate(places)]
    figure = picture_of(drawn_sweep(of=["lr"]), trials)
    figure.savefig(io.BytesIO())
    panel = next(p for p in figure.axes if p.get_xlabel() == "lr")
    assert panel.get_xscale() == "log"
    assert not overlap(panel.xaxis, figure)
    assert not overlap(panel.yaxis, figure)


@pytest.mark.parametrize(
    ("trials", "of"),
    [
        ([], PARAMETERS),
        ([CRASHED], ["lr", "kind"]),
        # the zero in the list of `decay` is not among what was drawn
        ([drawn(1)], ["decay", "batch"]),
        ([drawn(0, metric=[math.nan]), drawn(1, metric=[math.inf])], ["lr", "kind"]),
        ([drawn(0, metric=[-1.0]), drawn(1, metric=[1e9])], ["batch", "decay"]),
        ([drawn(0, arguments={})], PARAMETERS),
    ],
)
def test_odd_results_are_drawn(trials: list[Trial], of: Collection[str]) -> None:
    picture_of(drawn_sweep(of=of), trials).savefig(file := io.BytesIO())
    assert file.getvalue().startswith(b"\x89PNG")
