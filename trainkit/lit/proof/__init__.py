"""The proof that windows are the big batch, measured on the user's own module."""
