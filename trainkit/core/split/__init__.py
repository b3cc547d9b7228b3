"""Split windows: a loader batch is cut into micro-batches, the fastest way."""
