"""Sweeps without a server: W&B's engine proposes, this machine runs."""
