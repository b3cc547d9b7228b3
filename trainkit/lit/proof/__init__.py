"""The proof that windows are the big batch: two small trainings of a copy."""
