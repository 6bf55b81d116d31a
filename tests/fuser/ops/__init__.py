"""Tests of `fuser/ops`."""
