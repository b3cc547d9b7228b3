"""W&B as Hydra's sweeper, whose trials are jobs of Hydra's launchers."""
