"""The place of trainkit's groups, and the plugin by which Hydra finds them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any, ClassVar

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf

from trainkit.config._compat import register_resolver
from trainkit.config.groups import TrainSchema
from trainkit.config.run_name import run_name
from trainkit.config.targets import TARGET
from trainkit.errors import TrainkitError

PACKAGE = "pkg://trainkit.conf"


class TrainkitSearchPath(SearchPathPlugin):
    """Puts trainkit's groups behind those of an application, in every Hydra app.

    Attributes:
        first: a folder of groups that are found before all others.
    """

    first: ClassVar[Path | None] = None

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        provided = [element.provider for element in search_path.get_path()]
        if "trainkit" not in provided:
            search_path.append(provider="trainkit", path=PACKAGE)
        if self.first is not None:
            search_path.prepend(provider="first", path=f"file://{self.first}")


@contextmanager
def found_first(folder: str | None) -> Iterator[None]:
    """Make files in a folder replace trainkit's files of the same group and name.

    Hydra would read `--config-dir` last, and ignore these files in silence.
    """
    path = None if folder is None else Path(folder).absolute()
    root = "train.yaml"
    is_own = path is not None and not _is_of_a_clone(path)
    if path is not None and is_own and (path / root).is_file():
        raise of_another_program(path / root)
    before = TrainkitSearchPath.first
    TrainkitSearchPath.first = path
    try:
        yield
    finally:
        TrainkitSearchPath.first = before


def of_another_program(root: Path) -> TrainkitError:
    """The error for a root configuration that `trainkit train` does not read."""
    return TrainkitError(
        f"{root}: trainkit train reads its own train.yaml and not this one, which "
        f"belongs to another program, so it would train something else. Keep that "
        f"program, and add two lines to the defaults of this file, above experiment: "
        f"- accumulation: per_sample (or per_token) and - trainkit_callbacks. Or let "
        f"trainkit train the project: into a folder conf/ without a train.yaml, put "
        f"the groups model and data, and the values of this file as "
        f"experiment/default.yaml."
    )


def _is_of_a_clone(conf: Path) -> bool:
    """Whether these are trainkit's groups too, in another clone or git worktree."""
    return (conf.parent / "trainkit" / "config" / "conf.py").is_file()


def conf_dir() -> Path:
    """The folder of the groups that trainkit ships."""
    return Path(str(files("trainkit.conf")))


def register() -> None:
    """Register groups, types and resolvers; a second call has no effect.

    Hydra finds an installed trainkit by itself (`hydra_plugins`).
    """
    register_types()
    Plugins.instance().register(TrainkitSearchPath)


def register_types() -> None:
    """Register the types and resolvers that trainkit's groups use."""
    ConfigStore.instance().store("train_schema", TrainSchema, provider="trainkit")
    register_resolver("trainkit.run_name", run_name, use_cache=True)
    register_resolver("trainkit.accumulate", accumulate)
    register_resolver("trainkit.unless_scheduled", unless_scheduled)
    register_resolver("trainkit.name", name_of_model)
    register_resolver("trainkit.direction", lambda mode: f"{mode}imize")
    register_resolver("trainkit.chosen", chosen)
    register_resolver("trainkit.accumulation_callback", accumulation_callback)


def chosen(group: str, *, _root_: DictConfig) -> Any:
    """What a group of an application has chosen: None for `none`, and for no group."""
    return _root_.get(group) or None


def accumulation_callback(
    *, _root_: DictConfig, _parent_: DictConfig
) -> DictConfig | None:
    """The callback of `accumulation` and `micro_batching`: None if both are `none`."""
    groups = {"strategy": "accumulation", "micro_batching": "micro_batching"}
    options = {name: chosen(group, _root_=_root_) for name, group in groups.items()}
    if not any(options.values()):
        return None
    node = {TARGET: "trainkit.AccumulationCallback", **options}
    return OmegaConf.create(node, parent=_parent_)


def name_of_model(*, _root_: DictConfig) -> str:
    """The name of the class that the group `model` names."""
    model = OmegaConf.select(_root_, "model", throw_on_missing=False)
    target = str(model.get(TARGET, "")) if OmegaConf.is_dict(model) else ""
    return target.rpartition(".")[2] or "train"


def accumulate(target: int, micro_batch: int, world_size: int = 1) -> int:
    """The number of micro-batches in a window whose effective batch is `target`.

    In a config: `accumulate_grad_batches: ${trainkit.accumulate:64,${data.batch_size}}`

    >>> accumulate(64, 8), accumulate(64, 8, 2)
    (8, 4)

    Raises:
        TrainkitError: no whole number of micro-batches fits.
    """
    size = micro_batch * world_size
    if min(target, micro_batch, world_size) < 1 or target % size:
        each = target / world_size if world_size else target
        raise TrainkitError(
            f"trainkit.accumulate: micro-batch x ranks must divide the effective "
            f"batch, all of them at least 1, received {micro_batch} x {world_size} for "
            f"{target}. Choose a micro-batch that divides {each:g}, or other ranks."
        )
    return target // size


def unless_scheduled(size: int, *, _root_: DictConfig) -> int:
    """A size of windows, or 1 (Lightning's default) if the group `schedule` sets it."""
    return 1 if _root_.get("schedule") else size
