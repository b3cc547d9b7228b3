"""A causal model on documents that share a row, without padding."""

from .packed_lm import PackedLM, Texts

__all__ = ["PackedLM", "Texts"]
