"""A language model on the Python standard library's own functions."""

from .code_lm import CodeLM, Functions

__all__ = ["CodeLM", "Functions"]
