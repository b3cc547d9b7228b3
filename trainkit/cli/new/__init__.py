"""`trainkit new`: a folder for a training of one's own."""
