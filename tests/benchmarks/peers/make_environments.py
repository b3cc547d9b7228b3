"""A virtual environment for each framework, from the package registry.

    python -m tests.benchmarks.peers.make_environments /tmp/peers [trainkit keras ...]

Needs nothing but Python 3.10 to 3.12, a few minutes, and 1 to 2 GB for each. What is
there already stays. torch comes first and alone: a later step could otherwise take
another build of it. pip finds a CPU build where the variables PIP_EXTRA_INDEX_URL or
PIP_FIND_LINKS point to one; with a build for GPUs all works as well, and is larger.
"""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
TORCH = "torch==2.13.0"


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What is installed after torch, and what without the packages that it asks for."""

    packages: tuple[str, ...]
    alone: tuple[str, ...] = ()


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


RECIPES = {
    "lightning": Recipe(("lightning==2.6.6",)),
    "trainkit": Recipe(("lightning==2.6.6", "--editable", str(ROOT))),
    "huggingface": Recipe(words("transformers==5.23.0 accelerate==1.15.0")),
    "trl": Recipe(
        words("trl==1.16.0 transformers==5.23.0 accelerate==1.15.0 datasets==5.2.0")
    ),
    "accelerate": Recipe(("accelerate==1.15.0",)),
    "keras": Recipe(("keras==3.15.1",)),
    # Both ask for a torch of their own or for torchvision, which has no build for every
    # build of torch. So they are installed alone, beside the rest of what they import;
    # stand_in.py has the others.
    "composer": Recipe(
        words(
            "numpy<2 torchmetrics==1.7.4 coolname<3 importlib-metadata<9 "
            "packaging<25.1 pillow<12 tabulate==0.9.0 torch-optimizer<0.4 psutil "
            "py-cpuinfo pyyaml requests tqdm"
        ),
        alone=("mosaicml==0.32.1",),
    ),
    "super_gradients": Recipe(
        words(
            "numpy<2 torchmetrics==0.8 setuptools<80 einops==0.3.2 treelib==1.6.1 "
            "termcolor==1.1.0 json-tricks==3.16.1 hydra-core omegaconf matplotlib "
            "scipy tensorboard opencv-python-headless pillow psutil boto3 jsonschema "
            "Deprecated stringcase rapidfuzz requests tqdm"
        ),
        alone=("super-gradients==3.7.1",),
    ),
}


def python_of(folder: Path, name: str) -> Path:
    """The interpreter of a framework's environment."""
    return folder / name / "bin" / "python"


def make(folder: Path, name: str) -> None:
    ready = folder / name / ".ready"
    if ready.exists():
        print(f"{name}: there already")
        return
    print(f"{name}: being made", flush=True)
    venv.create(folder / name, with_pip=True, clear=True)
    recipe = RECIPES[name]
    pip(folder, name, TORCH)
    pip(folder, name, TORCH, *recipe.packages)
    if recipe.alone:
        pip(folder, name, "--no-deps", *recipe.alone)
    ready.touch()


def pip(folder: Path, name: str, *arguments: str) -> None:
    command = [str(python_of(folder, name)), "-m", "pip", "install", "--quiet"]
    subprocess.run([*command, *arguments], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the frameworks' environments.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(RECIPES)}")
    options = parser.parse_args()
    failed = []
    for name in options.names or RECIPES:
        try:
            make(options.folder.resolve(), name)
        except subprocess.CalledProcessError as error:
            failed.append(name)
            print(f"{name}: {error}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
