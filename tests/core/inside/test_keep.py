"""How many chunks keep their graph."""

from __future__ import annotations

import weakref

import numpy as np
import torch
from torch import nn

from trainkit.core.inside.keep import Keeper


def test_a_graph_that_was_measured_goes_without_a_backward_pass() -> None:
    """As after a forward pass whose memory ran out."""
    memory = np.zeros(4)
    with Keeper("auto").weighed([]):
        output = (torch.from_numpy(memory) * 1).mul_(nn.Parameter(torch.ones(4)))
        output = torch.from_numpy(memory).add_(output).exp_()
    gone = weakref.ref(memory)
    del memory, output
    assert gone() is None
