"""Typed configuration, and how it becomes objects."""

from typing import TYPE_CHECKING

from trainkit._lazy import lazy_exports

if TYPE_CHECKING:
    from trainkit.config.conf import conf_dir, register
    from trainkit.config.targets import allow_targets, instantiate
    from trainkit.config.translate import to_class_path, to_target

__all__ = [
    "allow_targets",
    "conf_dir",
    "instantiate",
    "register",
    "to_class_path",
    "to_target",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "allow_targets": ".targets",
        "conf_dir": ".conf",
        "instantiate": ".targets",
        "register": ".conf",
        "to_class_path": ".translate",
        "to_target": ".translate",
    },
)
