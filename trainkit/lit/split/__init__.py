"""Split windows: each loader batch is cut into micro-batches inside one step."""
