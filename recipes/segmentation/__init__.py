"""Segmentation by a U-Net with BatchNorm and Dice, in the memory of four images."""

from .segmentation import Segmentation, Shapes

__all__ = ["Segmentation", "Shapes"]
