"""Tests of `fuser/support`."""
