"""Sweeps on a W&B server, run by agents of the real client."""
