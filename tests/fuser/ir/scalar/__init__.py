"""Tests of `fuser/ir/scalar`."""
