"""Find the largest micro-batch that fits."""
