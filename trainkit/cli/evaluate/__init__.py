"""`trainkit validate | test | predict RUN`: a run with its best checkpoint."""
