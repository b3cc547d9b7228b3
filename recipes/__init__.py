"""Complete trainings to copy from, on what is installed with Python."""
