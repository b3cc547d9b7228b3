"""`trainkit train`: a training that Hydra configures."""
