"""Tests of trainkit; the folders below need no file of this kind."""
