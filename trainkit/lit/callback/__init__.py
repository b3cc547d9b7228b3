"""What callbacks share: their base, the table before training, the first windows."""
