"""The arithmetic of the proof: how far parts of a batch are from the whole, and why."""
