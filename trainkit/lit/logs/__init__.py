"""Output of a training: monitors, exact means, CSV files, progress."""
