"""Lightning's W&B logger, for runs that need no account and cannot hang."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
