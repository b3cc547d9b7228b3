"""BatchNorm in micro-batches: warnings and remedies."""
