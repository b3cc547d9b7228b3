"""What trainkit changes of Hydra, and a Hydra app with lines of YAML added."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import hydra
import pytest
import torch
from hydra import compose, initialize, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from tests.helpers import NAIVE, TOLERANCE
from tests.startup import CHILD_PATH, ended, forked
from trainkit import (
    AccumulationCallback,
    AccumulationSchedule,
    BatchNormGuard,
    LRScaling,
    MicroBatching,
    PerToken,
)
from trainkit.config import register
from trainkit.config._compat import (
    VERSION_BASE,
    hydra_arguments,
    register_resolver,
    without_group,
)


def test_hydras_own_options() -> None:
    parser = hydra_arguments()
    args = parser.parse_args(["--cfg", "job", "-cd", "conf", "-m", "seed=1"])
    assert (args.cfg, args.config_dir, args.multirun) == ("job", "conf", True)
    assert args.overrides == ["seed=1"]


def test_a_resolver_takes_the_place_of_one_of_its_name() -> None:
    for value in (1, 2):
        register_resolver("test.compat", lambda value=value: value)
        assert OmegaConf.create({"a": "${test.compat:}"}).a == value
    OmegaConf.clear_resolver("test.compat")


def test_one_folder_of_one_package_is_listed_as_no_group() -> None:
    GlobalHydra.instance().clear()
    register()
    groups: list[list[str]] = []
    with initialize(config_path=None, **VERSION_BASE):
        loader = GlobalHydra.instance().config_loader()
        for package in ("trainkit.conf", "another.package"):
            with without_group(package, "sweep"):
                groups.append(loader.list_groups(""))
        assert "sweep" in loader.list_groups("")  # as it was before
    hidden, listed = groups
    assert set(listed) - set(hidden) == {"sweep"}


# ---- a project in the shape of lightning-hydra-template ------------------------------


TRAIN = """
import hydra
import torch
from lightning import Callback, seed_everything
from omegaconf import DictConfig


def instantiate_callbacks(callbacks_cfg: DictConfig) -> list[Callback]:
    callbacks = []
    for _, cb_conf in callbacks_cfg.items():
        if isinstance(cb_conf, DictConfig) and "_target_" in cb_conf:
            callbacks.append(hydra.utils.instantiate(cb_conf))
    return callbacks


@hydra.main(version_base="1.3", config_path="../configs", config_name="train.yaml")
def main(cfg: DictConfig) -> None:
    seed_everything(cfg.seed, workers=True)
    datamodule = hydra.utils.instantiate(cfg.data)
    model = hydra.utils.instantiate(cfg.model)
    callbacks = instantiate_callbacks(cfg.get("callbacks"))
    trainer = hydra.utils.instantiate(cfg.trainer, callbacks=callbacks)
    start = model.net.weight.detach().clone()
    trainer.fit(model=model, datamodule=datamodule)
    torch.save([start, model.net.weight.detach()], cfg.paths.output_dir + "/weights")


if __name__ == "__main__":
    main()
"""

WORDS = """
import torch
from lightning import LightningDataModule, LightningModule
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader


def collate(rows):
    return {"ids": pad_sequence(rows, True), "labels": pad_sequence(rows, True, -100)}


class Data(LightningDataModule):
    def __init__(self, batch_size: int):
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self):
        rows = [torch.arange(n, n + n % 7 + 1) % 9 for n in range(22)]
        return DataLoader(rows, self.batch_size, collate_fn=collate)


class Net(LightningModule):
    def __init__(self, optimizer):
        super().__init__()
        self.optimizer = optimizer
        self.net = torch.nn.Embedding(9, 9, dtype=torch.float64)

    def training_step(self, batch, batch_idx):
        logits = self.net(batch["ids"]).flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, batch["labels"].flatten())

    def configure_optimizers(self):
        return self.optimizer(self.parameters())
"""

CONFIGS = {
    "train": "# @package _global_\ndefaults:\n  - _self_\n  - data: words\n"
    "  - model: net\n  - callbacks: default\n  - trainer: default\n  - paths: default\n"
    "  - hydra: default\n{lines}  - experiment: null\n\nseed: 3\n",
    "data/words": "_target_: src.words.Data\nbatch_size: 4\n",
    "model/net": "_target_: src.words.Net\noptimizer:\n  _target_: torch.optim.SGD\n"
    "  _partial_: true\n  lr: 0.5\n",
    "callbacks/default": "defaults: [timer, _self_]\ntimer:\n  interval: step\n",
    "callbacks/timer": "timer:\n  _target_: lightning.pytorch.callbacks.Timer\n",
    "trainer/default": "_target_: lightning.pytorch.trainer.Trainer\nmax_epochs: 2\n"
    "accelerator: cpu\ndevices: 1\naccumulate_grad_batches: 4\nlogger: false\n"
    "enable_checkpointing: false\nenable_progress_bar: false\n",
    "paths/default": "output_dir: ${hydra:runtime.output_dir}\n",
    "hydra/default": "sweep:\n  dir: runs\n"
    "  subdir: ${hydra:runtime.choices.experiment}\n",
    "experiment/streamed": "",
    "experiment/plain": "defaults:\n  - override /accumulation: none\n",
    "experiment/big": "defaults:\n  - override /accumulation: none\n"
    "data:\n  batch_size: 16\ntrainer:\n  accumulate_grad_batches: 1\n",
    "experiment/split": "defaults:\n  - override /micro_batching: size\n"
    "micro_batching:\n  size: 3\n"
    "data:\n  batch_size: 16\ntrainer:\n  accumulate_grad_batches: 1\n",
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with the lines that the front page shows."""
    page = (Path(__file__).parents[2] / "README.md").read_text()
    page = page.partition("**A Hydra app of your own**")[2]
    lines = re.findall(r"^    - .*\n", page.partition("\n#")[0], re.MULTILINE)
    assert len(lines) == 3
    for name, text in CONFIGS.items():
        path = tmp_path / "configs" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        is_experiment = name.startswith("experiment")
        text = f"# @package _global_\n{text}" if is_experiment else text
        path.write_text(text.replace("{lines}", "".join(line[2:] for line in lines)))
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "train.py").write_text(TRAIN)
    (tmp_path / "src" / "words.py").write_text(WORDS)
    return tmp_path


@pytest.mark.slow
def test_its_program_trains_exactly(project: Path) -> None:
    """In one process; plain Lightning is the control."""
    names = ("big", "streamed", "split", "plain")
    command = [sys.executable, "src/train.py", "-m", f"experiment={','.join(names)}"]
    paths = os.pathsep.join([CHILD_PATH, str(project), *filter(None, sys.path)])
    env = {**os.environ, **forked(), "PYTHONPATH": paths, "HYDRA_FULL_ERROR": "1"}
    done = ended(command, project, env, timeout=300)
    assert done.returncode == 0, done.stderr
    (start, big), streamed, split, plain = (
        torch.load(project / "runs" / name / "weights") for name in names
    )
    way = float((big - start).norm())
    off = [float((each[1] - big).norm()) / way for each in (streamed, split, plain)]
    assert way > NAIVE
    assert max(off[:2]) < TOLERANCE[torch.float64]
    assert off[2] > NAIVE


def callbacks_of(project: Path, *words: str) -> dict[str, Any]:
    """What the program would make of `callbacks`, by their names."""
    register()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(project / "configs"), **VERSION_BASE):
        nodes = compose("train", list(words)).callbacks
    made = {
        name: hydra.utils.instantiate(node)
        for name, node in nodes.items()
        if isinstance(node, DictConfig) and "_target_" in node
    }
    GlobalHydra.instance().clear()
    assert made.pop("timer")
    return made


def test_each_group_makes_its_callback(project: Path) -> None:
    made = callbacks_of(
        project,
        "micro_batching=tokens",
        "micro_batching.tokens=${size}",
        "+size=64",
        *("+lr_scaling=sqrt", "lr_scaling.reference_batch=8"),
        *("+batchnorm=momentum", "+schedule=ramp"),
    )
    accumulation = made["accumulation"]
    assert isinstance(accumulation, AccumulationCallback)
    assert accumulation.strategies == {"": PerToken()}
    assert accumulation.micro_batching == MicroBatching(tokens=64)
    kinds = {name: type(each) for name, each in made.items() if name != "accumulation"}
    assert kinds == {
        "lr_scaling": LRScaling,
        "batchnorm": BatchNormGuard,
        "schedule": AccumulationSchedule,
    }


def test_what_is_not_chosen_makes_none(project: Path) -> None:
    made = callbacks_of(project)
    assert list(made) == ["accumulation"]
    assert made["accumulation"].micro_batching is None
    words = ("accumulation=none", "+schedule=none", "+batchnorm=none")
    assert callbacks_of(project, *words) == {}
