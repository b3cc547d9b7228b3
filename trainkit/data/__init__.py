"""Loading: what reaches a training loop, and how it goes on after an interruption."""
