"""Tests of `fuser/ops/reference`."""
