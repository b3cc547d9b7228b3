"""The `trainkit` command."""
