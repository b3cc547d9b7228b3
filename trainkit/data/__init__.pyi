from .filler import WeighNothing as WeighNothing
from .length_sampler import TokenBudgetSampler as TokenBudgetSampler
from .packing import PackCollate as PackCollate
from .padding import PadCollate as PadCollate
from .resumable import ResumableLoader as ResumableLoader
from .streams import ResumableStream as ResumableStream
from .window_sampler import WindowSampler as WindowSampler
