from .layers import momentum_per_micro_batch as momentum_per_micro_batch
from .layers import to_group_norm as to_group_norm
from .recalibration import recalibrate as recalibrate
