from .logger import WandbRunLogger as WandbRunLogger
