"""Tests of `scripts` on a GPU."""
