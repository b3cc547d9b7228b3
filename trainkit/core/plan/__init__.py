"""What is planned before a training: batches, learning rates and stages."""
