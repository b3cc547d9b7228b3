"""Hydra groups: one folder for each constructor argument of a training."""
