"""Loading: what reaches a training loop, and how it resumes after an interruption."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
