"""The Lightning front: what a `Trainer` needs to step with exact gradients."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
