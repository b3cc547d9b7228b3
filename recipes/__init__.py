"""Complete trainings to copy from; they download nothing."""
