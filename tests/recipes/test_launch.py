"""recipes/README.md, recipes/launch and recipes/loops: every command and loop works."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from tests.startup import ended
from trainkit import Uniform
from trainkit.cli.composition import Composition
from trainkit.cli.runs.resume import expand
from trainkit.cli.words import key_of, options_first

RECIPES = Path(__file__).parents[2] / "recipes"
LAUNCH = RECIPES / "launch"
README = (RECIPES / "README.md").read_text()
BLOCKS = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
COMMANDS = [shlex.split(line) for block in BLOCKS for line in block.splitlines()]
NAMES = re.findall(r"^\| \[(\w+)\]\((\S+?)\)", README, re.MULTILINE)
ON_TWO_RANKS = re.findall(
    r"^\| ([\w, ]+) \| (`.*) \|$", README.partition("on two ranks |")[2], re.MULTILINE
)


def composed(words: list[str]) -> Composition:
    """Without what goes to a launcher."""
    words = [w for w in options_first(words) if not w.startswith("-m")]
    words = [w for w in words if not key_of(w).startswith("hydra")]
    words = [w.split(",")[0] if w.startswith("seed=") else w for w in words]
    return Composition(words)


def test_every_recipe_stands_in_the_table_and_has_a_line_for_two_ranks() -> None:
    named = {name for name, _ in NAMES}
    assert named == {path.parent.name for path in RECIPES.glob("*/__init__.py")}
    for name, file in NAMES:
        assert (RECIPES / file).is_file()
        assert f"`trainkit train experiment={name}`" in README
    listed = {name for names, _ in ON_TWO_RANKS for name in names.split(", ")}
    assert listed == named


@pytest.mark.parametrize(("names", "words"), ON_TWO_RANKS)
def test_the_step_on_two_ranks_is_that_of_one(names: str, words: str) -> None:
    """What is halved is all that differs in the size of the step."""
    overrides = shlex.split(" ".join(re.findall(r"`([^`]*)`", words)))
    for name in names.split(", "):
        one, two = (
            composed([f"experiment={name}", *more]).config for more in ([], overrides)
        )
        if "sizes" in one.schedule:
            windows = [list(c.schedule.sizes.values()) for c in (one, two)]
        else:
            windows = [[c.trainer.accumulate_grad_batches] for c in (one, two)]
        first, second = (
            [c.data.get("batch_size", 1) * size for size in sizes]
            for c, sizes in zip((one, two), windows, strict=True)
        )
        assert first == [2 * size for size in second]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_of_the_readme_composes(words: list[str]) -> None:
    words = [w for w in words if not re.fullmatch(r"[A-Z_]+=\S*", w)]
    if words[0] == "trainkit":
        assert words[1] == "train"
        assert composed(words[2:]).config.trainer
        return
    (script,) = [n for n, w in enumerate(words) if w.startswith("recipes/launch/")]
    assert (RECIPES.parent / words[script]).is_file()
    assert words[0] in ("sbatch", words[script])
    experiment, *overrides = words[script + 1 :]
    assert composed([f"experiment={experiment}", *overrides]).config.trainer


# ---- the scripts ---------------------------------------------------------------------


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """In the place of torchrun and SLURM: write down what they were given."""
    for name in ("torchrun", "srun", "scontrol"):
        program = tmp_path / name
        program.write_text(
            f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/{name}.given\n'
            f"exit ${{{name.upper()}_STATUS:-0}}\n"
        )
        program.chmod(0o755)
    return tmp_path


def launched(
    script: str, programs: Path, *words: str, **env: str
) -> subprocess.CompletedProcess[str]:
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    return ended([LAUNCH / script, *words], programs, {"PATH": path, **env})


def given(programs: Path, name: str) -> list[str]:
    return (programs / f"{name}.given").read_text().splitlines()


def test_torchrun_is_given_the_nodes_the_job_and_a_training(programs: Path) -> None:
    env = {"NODES": "2", "PROCESSES": "4", "JOB": "first", "RENDEZVOUS": "node0:29400"}
    done = launched("torchrun.sh", programs, "code_lm", "model.d_model=64", **env)
    assert done.returncode == 0, done.stderr
    said = get_args_parser().parse_args(given(programs, "torchrun"))
    assert (said.nnodes, said.nproc_per_node, said.rdzv_id) == ("2", "4", "first")
    assert (said.rdzv_backend, said.rdzv_endpoint) == ("c10d", "node0:29400")
    assert said.max_restarts == 3
    assert (said.module, said.training_script) == (True, "trainkit")
    assert said.training_script_args[0] == "train"
    config = Composition(said.training_script_args[1:]).config
    assert (config.trainer.num_nodes, config.trainer.devices) == (2, 4)
    assert (config.model.d_model, config.ckpt_path) == (64, "auto")


def test_jobs_of_one_machine_have_names_of_their_own(programs: Path) -> None:
    jobs = set()
    for _ in range(2):
        assert launched("torchrun.sh", programs, "code_lm").returncode == 0
        jobs.add(get_args_parser().parse_args(given(programs, "torchrun")).rdzv_id)
    assert len(jobs) == 2


@pytest.mark.parametrize(
    ("env", "text"),
    [
        ({"NODES": "2", "RENDEZVOUS": "a:1"}, "JOB: a name that all nodes are given"),
        ({"NODES": "2", "JOB": "first"}, "RENDEZVOUS: host:port of one of the nodes"),
    ],
)
def test_several_nodes_have_to_be_told_where_they_meet(
    env: dict[str, str], text: str, programs: Path
) -> None:
    done = launched("torchrun.sh", programs, "code_lm", **env)
    assert done.returncode != 0
    assert text in done.stderr
    assert not (programs / "torchrun.given").exists()


@pytest.mark.parametrize("script", ["torchrun.sh", "slurm.sh"])
def test_the_experiment_has_to_be_named(script: str, programs: Path) -> None:
    done = launched(script, programs)
    assert done.returncode != 0
    assert "the name of an experiment" in done.stderr


@pytest.mark.parametrize(
    ("status", "queued_again"),
    [(0, False), (1, False), (143, False), (130, True), (138, True), (140, True)],
)
def test_slurm_queues_again_what_its_time_limit_ended(
    status: int, queued_again: bool, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGINT comes before the end of the time; SIGTERM is scancel's."""
    env = {"SLURM_JOB_ID": "77", "SLURM_NTASKS_PER_NODE": "4"}
    env["SRUN_STATUS"] = str(status)
    done = launched("slurm.sh", programs, "code_lm", "seed=3", **env)
    assert done.returncode == status, done.stderr
    assert (programs / "scontrol.given").exists() is queued_again
    if queued_again:
        assert given(programs, "scontrol") == ["requeue", "77"]
    program, command, *words = given(programs, "srun")
    assert (program, command) == ("trainkit", "train")
    monkeypatch.chdir(programs)
    config = Composition(expand(words)).config
    assert config.paths.run_dir == "./outputs/code_lm/slurm-77"
    assert (config.trainer.devices, config.seed) == (4, 3)


NO_DASHBOARD = """
import runpy, sys, ray
ray.init(include_dashboard=False)
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""A script as it is, but for what takes a sixth of its time."""


@pytest.mark.environments
def test_workers_of_ray_train_are_one_process(tmp_path: Path) -> None:
    pytest.importorskip("ray.train")
    script = str(LAUNCH / "ray_train.py")
    env = {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    env["RAY_worker_niceness"] = "0"  # by default 15: they starve beside other tests
    done = ended(
        [sys.executable, "-c", NO_DASHBOARD, script, "--accelerator", "cpu"],
        tmp_path,
        {**os.environ, **env},
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    (off,) = re.findall(r"^2 workers: (\S+) from", done.stdout, re.MULTILINE)
    assert float(off) < 1e-14
    # Of one worker of four micro-batches, the rehearsal says nothing.
    assert "x ranks 2 = 16 samples a step" in done.stdout
    assert "x ranks 1 = 6 samples a step" not in done.stdout


@pytest.mark.environments
@pytest.mark.filterwarnings("ignore:proof. a window:UserWarning")
def test_its_rows_tell_plain_accumulation_from_the_big_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The control of the test above."""
    pytest.importorskip("ray.train")
    monkeypatch.syspath_prepend(str(LAUNCH))
    import ray_train  # type: ignore[import-not-found]

    big, ours = ray_train.fit(16, 1), ray_train.fit(2, 8)
    monkeypatch.setattr(ray_train, "PerToken", Uniform)
    plain = ray_train.fit(2, 8)
    same, off = ((big.net.weight - m.net.weight).abs().max() for m in (ours, plain))
    assert same < 1e-14
    assert off > 1e-4


def test_options_of_sbatch_are_those_that_the_trainer_needs() -> None:
    lines = (LAUNCH / "slurm.sh").read_text().splitlines()
    pairs = [
        line.removeprefix("#SBATCH --").partition("=")
        for line in lines
        if line.startswith("#SBATCH")
    ]
    options = {name: value for name, _, value in pairs}
    assert options["ntasks-per-node"] == options["gpus-per-node"]
    assert options["signal"].startswith("INT@")
    assert {"nodes", "requeue"} <= options.keys()


# ---- loops without Lightning's Trainer, each run as its file says --------------------


LOOPS = Path(__file__).parents[2] / "recipes" / "loops"
EXACT_LINE = re.compile(r"^(.*): (\S+) from the big batch$", re.M)
PLAIN_LINE = re.compile(r"(\d+)%")


def test_each_loop_is_tried() -> None:
    assert {path.name for path in LOOPS.glob("*.py")} == {name for name, *_ in LINES}


LINES = [
    ("plain.py", 3, 3),
    ("with_fabric.py", 1, 0),
    ("hf_trainer.py", 1, 1),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_exact", "num_plain"), LINES)
def test_it_is_the_big_batch(
    name: str, num_exact: int, num_plain: int, tmp_path: Path
) -> None:
    """In float64; what it prints beside it, plain accumulation, is the control."""
    done = ended([sys.executable, str(LOOPS / name)], tmp_path)
    assert done.returncode == 0, done.stderr
    exact = [float(off) for _, off in EXACT_LINE.findall(done.stdout) if "%" not in off]
    plain = [int(off) for off in PLAIN_LINE.findall(done.stdout)]
    assert len(exact) == num_exact
    assert max(exact) < 1e-12
    assert len(plain) == num_plain
    assert all(off > 2 for off in plain)
