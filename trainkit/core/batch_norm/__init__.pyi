from .layers import momentum_per_micro_batch as momentum_per_micro_batch
from .recalibration import recalibrate as recalibrate
from .renorm import BatchRenorm as BatchRenorm
from .replace import to_group_norm as to_group_norm
from .replace import to_renorm as to_renorm
from .replace import to_sync as to_sync
