"""The search for the largest micro-batch that fits."""
