"""`trainkit lengths`: how long the rows of a data set are."""
