"""The schedule that changes the size of windows during training, and its steps."""
