"""The effective batch of a training: known from its loader, or measured."""
