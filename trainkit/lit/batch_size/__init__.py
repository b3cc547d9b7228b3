"""How large a window is: the effective batch, and how unlike micro-batches are."""
