"""Contrastive learning in chunks of rows: every image has the whole batch's negatives."""

from .contrastive import Contrastive, Digits

__all__ = ["Contrastive", "Digits"]
