"""The inner cut: one module runs in chunks of rows while the step runs once."""
