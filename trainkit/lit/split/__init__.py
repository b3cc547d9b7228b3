"""Windows of one loader batch, cut into micro-batches on the host."""
