"""Tests of `fuser/nvfuser`."""
