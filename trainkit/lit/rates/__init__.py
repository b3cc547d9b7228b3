"""Learning rates that follow the batch: scaled, announced, averaged."""
