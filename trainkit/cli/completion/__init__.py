"""`trainkit completion`: what the shell offers when Tab is pressed."""
