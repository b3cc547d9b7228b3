"""Regression on small data, whose last batch is smaller than the others."""

from .ragged_regression import Diabetes, Regression

__all__ = ["Diabetes", "Regression"]
