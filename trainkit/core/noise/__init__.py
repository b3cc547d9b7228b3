"""The noise of gradients, measured in the micro-batches of a window."""
