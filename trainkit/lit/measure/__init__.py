"""Gradients of a few rows, measured without a trace."""
