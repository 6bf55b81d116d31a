"""Tests of `fuser/ir/domain`."""
