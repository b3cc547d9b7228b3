"""What a training says: monitors, exact means, CSV files, progress."""
