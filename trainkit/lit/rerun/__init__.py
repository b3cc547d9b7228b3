"""Run a training step again: put everything back, and run without a trace."""
