"""`report.html` and pictures of a run, drawn from its `metrics.csv`."""
