"""One thread: the models are tiny, and several ranks share the machine."""

import torch

torch.set_num_threads(1)
