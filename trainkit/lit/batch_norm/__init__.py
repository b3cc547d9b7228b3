"""The policies of `BatchNormGuard`, and what they need."""
