"""The inner cut in a `fit`: which modules run in chunks, and for how long."""
