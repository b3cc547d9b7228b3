"""What `BatchNormGuard` does, one policy a file."""
