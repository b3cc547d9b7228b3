"""BatchNorm under accumulation: what no gradient can make up for, and its remedies."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
