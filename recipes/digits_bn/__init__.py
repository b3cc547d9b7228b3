"""A convolutional net with BatchNorm on scikit-learn's digits."""

from .digits_bn import Digits, DigitsNet

__all__ = ["Digits", "DigitsNet"]
