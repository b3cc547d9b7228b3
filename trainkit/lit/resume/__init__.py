"""Stop, save and resume a training without a trace."""
