"""The parts of `find_micro_batch`, each with one thing to do."""
