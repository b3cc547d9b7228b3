"""A language model on the Python standard library's own functions."""

from trainkit.recipes.code_lm.code_lm import CodeLM, Functions

__all__ = ["CodeLM", "Functions"]
