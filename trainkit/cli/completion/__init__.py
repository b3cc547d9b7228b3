"""`trainkit completion`: candidates for a shell in which Tab is pressed."""
