"""A language model on the Python standard library's own functions."""

from .code_lm import CodeLM, Functions, read_functions

__all__ = ["CodeLM", "Functions", "read_functions"]
