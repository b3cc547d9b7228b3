"""The size of a window: the effective batch, and how unlike micro-batches are."""
