"""How large a batch pays, measured on the standard library's functions."""

from .batch_size import Pieces, SmallLM

__all__ = ["Pieces", "SmallLM"]
