"""A mixture of experts, balanced over the whole batch and not over each part of it."""

from .moe import Blocks, MixtureLM

__all__ = ["Blocks", "MixtureLM"]
