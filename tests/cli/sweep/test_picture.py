"""The picture: a panel for each swept parameter, logarithms where they belong."""

from __future__ import annotations

import io
import math
from collections.abc import Collection
from typing import Any

import pytest
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from trainkit.cli.sweep.sweep_file import SweepFile
from trainkit.cli.sweep.trial import Trial, picture_of

PARAMETERS: dict[str, Any] = {
    "lr": {"distribution": "log_uniform_values", "min": 0.001, "max": 1.0},
    "batch": {"values": [4, 8, 16]},
    "decay": {"values": [0.0, 0.1]},
    "kind": {"values": ["sqrt", "none", None]},
    "fixed": {"value": 3},
}


def sweep(goal: str = "minimize", *, of: Collection[str] = PARAMETERS) -> SweepFile:
    config = {
        "program": "t.py",
        "method": "random",
        "metric": {"name": "val/loss", "goal": goal},
        "parameters": {name: PARAMETERS[name] for name in of},
    }
    return SweepFile.model_validate(config)


def trial(n: int, **about: Any) -> Trial:
    arguments = {
        "lr": 0.001 * (n + 1),
        "batch": [4, 8, 16][n % 3],
        "decay": 0.1 * (n % 2),
        "kind": ["sqrt", "none", None][n % 3],
        "fixed": 3,
    }
    given: dict[str, Any] = {"state": "finished", "metric": [1.0 / (n + 1)], **about}
    return Trial(name=f"t{n}", **{"arguments": arguments, **given})


CRASHED = trial(6, state="crashed", metric=[])


@pytest.mark.parametrize(("goal", "best"), [("minimize", 5), ("maximize", 0)])
def test_each_swept_parameter_has_a_panel_and_its_own_scale(
    goal: str, best: int
) -> None:
    trials = [*(trial(n) for n in range(6)), CRASHED, trial(7, state="stopped")]
    figure = picture_of(sweep(goal), trials)
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
def test_labels_of_a_logarithmic_axis_do_not_run_into_each_other(
    span: float,
) -> None:
    places = [0.013 * span ** (n / 3) for n in range(4)]
    trials = [trial(n, arguments={"lr": x}, metric=[x]) for n, x in enumerate(places)]
    figure = picture_of(sweep(of=["lr"]), trials)
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
        ([trial(1)], ["decay", "batch"]),
        ([trial(0, metric=[math.nan]), trial(1, metric=[math.inf])], ["lr", "kind"]),
        ([trial(0, metric=[-1.0]), trial(1, metric=[1e9])], ["batch", "decay"]),
        ([trial(0, arguments={})], PARAMETERS),
    ],
)
def test_odd_results_are_drawn(trials: list[Trial], of: Collection[str]) -> None:
    picture_of(sweep(of=of), trials).savefig(file := io.BytesIO())
    assert file.getvalue().startswith(b"\x89PNG")
