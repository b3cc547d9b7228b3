"""Sweeps without a server: Optuna proposes, this machine runs."""
