"""Tests of `fuser/passes`."""
