"""A generative adversarial net on scikit-learn's digits: manual optimization."""

from .gan import Digits, DigitsGAN

__all__ = ["Digits", "DigitsGAN"]
