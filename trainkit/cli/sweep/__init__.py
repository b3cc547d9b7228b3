"""`trainkit sweep`: W&B sweeps, with or without a server."""
