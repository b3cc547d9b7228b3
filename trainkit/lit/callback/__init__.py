"""What callbacks share: their base, and the table before training."""
