"""Tests of `fuser/lower/passes`."""
