"""`trainkit fit | validate | test | predict`: the Lightning CLI."""
