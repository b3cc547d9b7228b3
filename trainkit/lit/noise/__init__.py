"""The noise scale: what a window is worth, measured while it trains."""
