"""The plugin by which Hydra finds trainkit's groups, in its own `hydra_plugins`."""

from trainkit.config.conf import TrainkitSearchPath, register_types

__all__ = ["TrainkitSearchPath"]

register_types()  # Hydra registers the plugin itself
