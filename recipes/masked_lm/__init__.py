"""An encoder that fills in masked tokens of Python's own documentation."""

from .masked_lm import MaskedLM, Paragraphs

__all__ = ["MaskedLM", "Paragraphs"]
