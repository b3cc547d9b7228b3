from .layers import momentum_per_micro_batch as momentum_per_micro_batch
from .recalibration import recalibrate as recalibrate
from .replace import to_group_norm as to_group_norm
