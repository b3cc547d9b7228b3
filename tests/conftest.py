"""One thread: the models are tiny, and several processes share the machine."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # also for processes that tests start

import torch

torch.set_num_threads(1)
