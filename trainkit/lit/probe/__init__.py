"""The search for the micro-batch that fits and is fastest."""
