"""Tests of `fuser/schedule`."""
