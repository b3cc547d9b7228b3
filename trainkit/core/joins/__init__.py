"""Exact BatchNorm: micro-batches meet at each layer and share their statistics."""
