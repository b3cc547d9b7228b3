"""How Hydra finds trainkit's groups: it looks through the namespace `hydra_plugins`."""

from trainkit.config.conf import TrainkitSearchPath, register_types

__all__ = ["TrainkitSearchPath"]

register_types()  # not the plugin itself: Hydra is in the middle of that
