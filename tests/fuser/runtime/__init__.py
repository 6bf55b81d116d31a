"""Tests of `fuser/runtime`."""
