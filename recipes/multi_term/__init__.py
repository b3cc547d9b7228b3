"""A sequence VAE: one term of the loss per character, one per name."""

from .multi_term import Names, NameVAE

__all__ = ["NameVAE", "Names"]
