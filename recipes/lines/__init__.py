"""The package that a line of the standard library comes from."""

from .lines import Classifier, Lines

__all__ = ["Classifier", "Lines"]
