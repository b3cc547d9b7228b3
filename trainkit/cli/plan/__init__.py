"""`trainkit plan`: sizes for the effective batch you mean."""
