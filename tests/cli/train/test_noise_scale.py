"""`lr_scaling.noise_scale=RUN_FOLDER`: the run keeps the number, not the folder."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.training import run_dirs, the_run, train
from trainkit.core.noise.estimate import NoiseEstimate

GAIN = [
    "lr_scaling=gain",
    "lr_scaling.reference_batch=2",
    "scheduler=none",
    "trainer.log_every_n_steps=1",
]
KEPT = "++lr_scaling.noise_scale=43.25"


def earlier_run(name: str = "earlier", samples: float = 43.25) -> Path:
    facts = NoiseEstimate(samples, samples / 2, 2 * samples, 32.0, 1.0, 50).facts()
    Path(name).mkdir(exist_ok=True)
    Path(name, "summary.json").write_text(json.dumps({"noise_scale": facts}))
    return Path(name)


def config_of(run: Path) -> dict[str, Any]:
    return yaml.safe_load((run / "config.yaml").read_text())


def words_of(run: Path) -> list[str]:
    return yaml.safe_load((run / "overrides.yaml").read_text())


def rate_of(run: Path) -> float:
    """The last that was logged: a checkpoint holds that of a run without scaling."""
    with (run / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    (name,) = (each for each in rows[0] if each.startswith("lr-"))
    return [float(row[name]) for row in rows if row[name]][-1]


def test_the_run_keeps_the_number_of_the_folder(tmp_path: Path, capsys: Any) -> None:
    folder = earlier_run()
    assert train(*GAIN, "lr_scaling.noise_scale=earlier") == 0
    assert "noise scale 43.25 from earlier, reference 2)" in capsys.readouterr().out
    run = the_run(tmp_path)
    assert config_of(run)["lr_scaling"]["noise_scale"] == 43.25
    assert KEPT in words_of(run)
    assert not any("earlier" in word for word in words_of(run))
    factor = ((1 + 43.25 / 2) / (1 + 43.25 / 8)) ** 0.5
    base = config_of(run)["optimizer"]["lr"]
    assert rate_of(run) == pytest.approx(base * factor, rel=1e-12)

    shutil.rmtree(folder)
    assert train("ckpt_path=last", "trainer.max_steps=3", small=[]) == 0
    assert "noise scale 43.25, reference 2)" in capsys.readouterr().out
    assert rate_of(run) == pytest.approx(base * factor, rel=1e-12)

    earlier_run(samples=1.0)  # what is given now counts
    again = ["ckpt_path=last", "lr_scaling.noise_scale=earlier", "trainer.max_steps=4"]
    assert train(*again, small=[]) == 0
    assert config_of(run)["lr_scaling"]["noise_scale"] == 1.0
    assert [word for word in words_of(run) if "noise" in word] == [
        "++lr_scaling.noise_scale=1.0"
    ]
    factor = ((1 + 1.0 / 2) / (1 + 1.0 / 8)) ** 0.5
    assert rate_of(run) == pytest.approx(base * factor, rel=1e-12)


def test_an_unchanged_command_resumes_with_the_number_that_it_has_read(
    tmp_path: Path, capsys: Any
) -> None:
    folder = earlier_run()
    same = ["ckpt_path=auto", *GAIN, "lr_scaling.noise_scale=earlier"]
    assert train(*same) == 0
    run = the_run(tmp_path)
    before = rate_of(run)
    shutil.rmtree(folder)
    assert train(*same, "trainer.max_steps=3") == 0
    assert "noise scale: 43.25, as read when this run began" in capsys.readouterr().out
    assert rate_of(run) == before
    assert KEPT in words_of(run)
    assert train(*same, "lr_scaling.noise_scale=null") == 2  # this is no folder
    # The control: a number is a change of the command.
    assert train(*same, "trainer.max_steps=4", "lr_scaling.noise_scale=9") == 0
    assert config_of(run)["lr_scaling"]["noise_scale"] == 9
    assert "++lr_scaling.noise_scale=9" in words_of(run)
    assert rate_of(run) < 0.9 * before


def test_each_run_of_several_keeps_its_own_and_a_number_stays_a_word(
    tmp_path: Path,
) -> None:
    earlier_run()
    words = [*GAIN, "lr_scaling.noise_scale=earlier,40", "trainer.max_steps=1"]
    assert train("-m", *words) == 0
    of_folder, of_number = run_dirs(tmp_path)
    assert config_of(of_folder)["lr_scaling"]["noise_scale"] == 43.25
    assert config_of(of_number)["lr_scaling"]["noise_scale"] == 40
    assert "lr_scaling.noise_scale=40" in words_of(of_number)


def test_a_folder_that_a_file_names_is_kept_as_its_number_too(tmp_path: Path) -> None:
    earlier_run()
    file = tmp_path / "conf" / "lr_scaling" / "mine.yaml"
    file.parent.mkdir(parents=True)
    text = "_target_: trainkit.LRScaling\nrule: gain\nreference_batch: 2\n"
    file.write_text(f"{text}noise_scale: earlier\n")
    assert train("lr_scaling=mine") == 0
    run = the_run(tmp_path)
    assert config_of(run)["lr_scaling"]["noise_scale"] == 43.25
    assert words_of(run)[-1] == KEPT


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (GAIN, "lr_scaling.noise_scale: must be given. Add lr_scaling.noise_scale=..."),
        ([*GAIN, "lr_scaling.noise_scale=0"], "noise_scale: must be a positive number"),
        ([*GAIN, "lr_scaling.noise_scale=no"], "received 'no', and there is no such f"),
        ([*GAIN, "lr_scaling.noise_scale=."], "noise_scale: . must be the folder of a"),
        (
            [*GAIN, "lr_scaling.noise_scale=4", "lr_scaling.unit=tokens"],
            "LRScaling unit: must be 'samples' for rule='gain', received 'tokens'",
        ),
        (
            ["lr_scaling=sqrt", GAIN[1], "lr_scaling.noise_scale=4"],
            "noise_scale: belongs to rule='gain', received 4 for rule='sqrt'",
        ),
    ],
)
def test_a_wrong_line_is_refused_and_leaves_no_run(
    tmp_path: Path, words: list[str], said: str, capsys: Any
) -> None:
    assert train(*words) == 2
    assert said in capsys.readouterr().err
    assert run_dirs(tmp_path) == []
