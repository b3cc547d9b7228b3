from .conf import conf_dir as conf_dir
from .conf import register as register
from .targets import allow_targets as allow_targets
from .targets import instantiate as instantiate
