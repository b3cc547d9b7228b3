"""Contrastive learning in chunks of rows, with the negatives of the whole batch."""

from .contrastive import Contrastive, Digits

__all__ = ["Contrastive", "Digits"]
