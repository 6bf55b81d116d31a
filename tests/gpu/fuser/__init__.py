"""Tests of `fuser` on a GPU."""
